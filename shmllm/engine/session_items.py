"""The items that a front end has sent, and which of them the engine keeps for later requests.

This module copies items out of the front end's slots. It must not know what they contain.

A front end names its items as it likes. Caches of the engine, which all front ends share, know them
by an identity that covers their data, kind and grid, too: otherwise one that gives two items the
same name would get, and give others, the embeddings of the wrong one.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.tensors import TensorReader, TensorRef
from shmllm.params.items import MODALITIES, MOST_ITEM_BYTES, Item, Modality
from shmllm.wire.messages import PromptItem

MOST_PENDING_BYTES = 2**32
"""The most bytes of the items of one request."""
MOST_EXCESS_BYTES = 2**30
"""By how much a front end may exceed what it keeps here. A signal handler may interrupt it between
what it counts and what it sends."""
KIND = Struct("<B?d3I")

_FORMS: dict[Modality, tuple[Any, int]] = {
    "image": (np.dtype(np.uint8), 4),
    "audio": (np.dtype(np.float32), 2),
    "video": (np.dtype(np.uint8), 4),
}
"""The dtype of an item's data, and the number of their dimensions. The runner checks the rest."""
_OF_EMBEDS = np.dtype(np.float32), 2


class _Kept(NamedTuple):
    """The data of a front end's slot, and their SHA-256."""

    data: Any
    digest: bytes


class SessionItems:
    """
    Args:
        tensors: reads the front end's slots.

    Attributes:
        num_bytes: the bytes of the data that are kept.
    """

    def __init__(self, tensors: TensorReader) -> None:
        self._tensors = tensors
        self._kept: dict[bytes, _Kept] = {}
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
            ProtocolMismatchError: there are no such data, or too many.
        """
        item = message.item
        found = self._copy(message) if message.ref else self._kept.get(item.identity)
        if found is None:
            raise ProtocolMismatchError("PROMPT_ITEM without data names none that are kept")
        if message.ref:
            self._forget(item.identity)
            self._kept[item.identity] = found
            self.num_bytes += found.data.nbytes
        for identity in message.forgotten:
            self._forget(identity)
        if self._pending and self._pending[0][0] != message.number:
            self._drop_pending()  # their request was interrupted, and never comes
        kind = KIND.pack(
            MODALITIES.index(item.modality), item.is_embeds, item.frame_seconds, *item.grid
        )
        identity = sha256(item.identity + kind + found.digest).digest()
        own = replace(item, identity=identity, data=found.data)
        self._pending.append((message.number, own))
        self._num_pending_bytes += found.data.nbytes
        if self.num_bytes > most_bytes + MOST_EXCESS_BYTES:
            raise ProtocolMismatchError(f"items of {self.num_bytes:,} bytes are to be kept")
        if len(self._pending) > most_items or self._num_pending_bytes > MOST_PENDING_BYTES:
            raise ProtocolMismatchError("more items than a request can have")

    def take(self, number: int) -> tuple[Item, ...]:
        """The items of a request, in order."""
        pending = self._pending
        self._drop_pending()
        return tuple(item for owner, item in pending if owner == number)

    def clear(self) -> None:
        """Forget all items."""
        self._kept.clear()
        self._drop_pending()
        self.num_bytes = 0

    def _drop_pending(self) -> None:
        self._pending, self._num_pending_bytes = [], 0

    def _forget(self, identity: bytes) -> None:
        kept = self._kept.pop(identity, None)
        if kept is not None:
            self.num_bytes -= kept.data.nbytes

    def _copy(self, message: PromptItem) -> _Kept:
        ref = TensorRef.decode(message.ref)
        if ref.slot.nbytes > MOST_ITEM_BYTES:
            raise ProtocolMismatchError(f"PROMPT_ITEM of {ref.slot.nbytes:,} bytes")
        with self._tensors.view(ref) as view:
            data = view.numpy()
            modality = message.item.modality
            form = _OF_EMBEDS if message.item.is_embeds else _FORMS[modality]
            if not data.size or (data.dtype, data.ndim) != form:
                raise ProtocolMismatchError(
                    f"the data of PROMPT_ITEM ({modality}) are {data.dtype} of shape "
                    f"{list(data.shape)}"
                )
            data = data.copy()
            return _Kept(data, sha256(data.data).digest())
