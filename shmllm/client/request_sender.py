"""Sends requests to an engine, behind the tensors that belong to their prompts.

An exception of a signal handler may end any function. Then a record was sent, or nobody else knows
of its slots, and they are free again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmllm.client.sending import MakeRoom, send, transmit
from shmllm.client.sent_items import SentItems
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.tensors import TensorWriter
from shmllm.params.items import Item
from shmllm.params.pooling import Pooling
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.messages import PromptEmbeds, PromptItem, RecordKind

Put = Callable[[Any], bytes]
"""Copies a tensor into a slot; returns its encoded `TensorRef`."""


class RequestSender:
    """
    Args:
        channel: the channel to the engine.
    """

    def __init__(self, channel: ClientChannel) -> None:
        self._channel = channel
        self._items = SentItems(0)

    def keep_items(self, most_bytes: int) -> None:
        """Let the engine keep so many bytes of images for later requests."""
        self._items = SentItems(most_bytes)

    def send(self, request: EngineCoreRequest, make_room: MakeRoom) -> None:
        """Send a request.

        Args:
            request: the request.
            make_room: see `sending`.
        """
        if request.embeds is not None or request.items:
            self._send_tensors(request, make_room)
        is_pooling = isinstance(request.params, Pooling)
        kind = RecordKind.POOL if is_pooling else RecordKind.ADD
        parts = codec.encode_pool(request) if is_pooling else codec.encode_add(request)
        send(self._channel, kind, parts, make_room)

    def _send_tensors(self, request: EngineCoreRequest, make_room: MakeRoom) -> None:
        number, slots = request.number, TensorWriter(self._channel.slots)

        def put(tensor: Any) -> bytes:
            return slots.put(tensor, deadline=None, on_full=make_room).encode()

        if request.embeds is not None:
            transmit(
                self._channel,
                RecordKind.PROMPT_EMBEDS,
                lambda: codec.encode_prompt_embeds(PromptEmbeds(number, put(request.embeds))),
                make_room,
            )
        for item in request.items:
            self._send_item(number, item, put, make_room)

    def _send_item(self, number: int, item: Item, put: Put, make_room: MakeRoom) -> None:
        """Send an item, with its data if the engine does not have them."""
        kind = RecordKind.PROMPT_ITEM
        if self._items.has(item):
            known = codec.encode_prompt_item(PromptItem(number, item))
            send(self._channel, kind, known, make_room)
            return
        forgotten = self._items.make_room(item)
        transmit(
            self._channel,
            kind,
            lambda: codec.encode_prompt_item(PromptItem(number, item, put(item.data), forgotten)),
            make_room,
        )
        self._items.sent(item)
