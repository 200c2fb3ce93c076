"""The items that a front end has sent, and which of them the engine keeps for later requests.

This module copies pixels out of the front end's slots. It must not know what they show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.tensors import TensorReader, TensorRef
from shmllm.params.items import Item
from shmllm.wire.messages import PromptItem

LARGEST_BYTES = 2**28
"""The most bytes of one item."""
MOST_PENDING_BYTES = 2**32
"""The most bytes of the items of one request."""
MOST_EXCESS_BYTES = 2**30
"""By how much a front end may exceed what it keeps here. A signal handler may interrupt it between
what it counts and what it sends."""


class SessionItems:
    """
    Args:
        tensors: reads the front end's slots.

    Attributes:
        num_bytes: the bytes of the pixels that are kept.
    """

    def __init__(self, tensors: TensorReader) -> None:
        self._tensors = tensors
        self._kept: dict[bytes, Any] = {}
        self.num_bytes = 0
        self._pending: list[tuple[int, Item]] = []
        self._num_pending_bytes = 0

    def keep(self, message: PromptItem, most_items: int, most_bytes: int) -> None:
        """Take an item of the request that follows.

        Args:
            message: the item.
            most_items: the most items of a request.
            most_bytes: the most bytes that the front end may keep here.

        Raises:
            ProtocolMismatchError: there are no such pixels, or too many.
        """
        item = message.item
        pixels = self._copy(message.ref) if message.ref else self._kept.get(item.identity)
        if pixels is None:
            raise ProtocolMismatchError("PROMPT_ITEM without pixels names none that are kept")
        if message.ref:
            self._forget(item.identity)
            self._kept[item.identity] = pixels
            self.num_bytes += pixels.nbytes
        for identity in message.forgotten:
            self._forget(identity)
        self._pending.append((message.number, replace(item, pixels=pixels)))
        self._num_pending_bytes += pixels.nbytes
        if self.num_bytes > most_bytes + MOST_EXCESS_BYTES:
            raise ProtocolMismatchError(f"items of {self.num_bytes:,} bytes are to be kept")
        if len(self._pending) > most_items or self._num_pending_bytes > MOST_PENDING_BYTES:
            raise ProtocolMismatchError("more items than a request can have")

    def take(self, number: int) -> tuple[Item, ...]:
        """The items of a request, in order."""
        pending, self._pending, self._num_pending_bytes = self._pending, [], 0
        return tuple(item for owner, item in pending if owner == number)

    def clear(self) -> None:
        """Forget all items."""
        self._kept.clear()
        self._pending.clear()

    def _forget(self, identity: bytes) -> None:
        pixels = self._kept.pop(identity, None)
        if pixels is not None:
            self.num_bytes -= pixels.nbytes

    def _copy(self, encoded: bytes) -> Any:
        ref = TensorRef.decode(encoded)
        if ref.slot.nbytes > LARGEST_BYTES:
            raise ProtocolMismatchError(f"PROMPT_ITEM of {ref.slot.nbytes:,} bytes")
        with self._tensors.view(ref) as view:
            pixels = view.numpy()
            if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
                raise ProtocolMismatchError(
                    f"the pixels of PROMPT_ITEM are {pixels.dtype} of shape {list(pixels.shape)}"
                )
            return pixels.copy()
