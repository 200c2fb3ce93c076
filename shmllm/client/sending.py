"""Sends records to an engine, large ones through slots.

`make_room` is called while the ring or the slots are full: it reads outputs, because otherwise this
process and an engine that waits for room in the output ring could block each other, and raises
EngineDeadError if the engine has ended.

An exception of a signal handler may end any function. Then the record was sent, or nobody else
knows of its slots, and they are free again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.ring import record_span
from shmllm.ipc.slots import Slot
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind

SLOT_WAIT_S = 0.001
"""How long one wait for a free slot lasts, in seconds."""

MakeRoom = Callable[[], None]


def send(channel: ClientChannel, kind: RecordKind, parts: codec.Parts, make_room: MakeRoom) -> None:
    """Send a record that names no slot."""
    channel.beat()
    if _size_of(parts) > channel.requests.max_payload_bytes:
        transmit(channel, kind, lambda: parts, make_room)
    else:
        channel.send(kind, *parts, on_full=make_room, deadline=None)


def transmit(
    channel: ClientChannel,
    kind: RecordKind,
    put: Callable[[], codec.Parts],
    make_room: MakeRoom,
) -> None:
    """Send a record that names slots.

    Args:
        channel: the channel to the engine.
        kind: the kind of the record.
        put: fills and publishes the slots, and returns the record.
        make_room: see above.
    """
    slots, before = channel.slots, channel.requests.position
    slots.begin_message()
    try:
        kind, parts = fill(channel, kind, put, make_room)
        channel.send(kind, *parts, on_full=make_room, deadline=None)
    except BaseException:
        if channel.requests.position == before:
            slots.take_back()
        raise


def fill(
    channel: ClientChannel,
    kind: RecordKind,
    put: Callable[[], codec.Parts],
    make_room: MakeRoom,
) -> tuple[RecordKind, codec.Parts]:
    """Fill the slots of a record, as `transmit` does, and return the record without sending it."""
    parts = put()
    if _size_of(parts) > channel.requests.max_payload_bytes:
        return RecordKind.IN_SLOT, _put_in_slot(channel, kind, parts, make_room)
    return kind, parts


def await_room(channel: ClientChannel, parts: codec.Parts, make_room: MakeRoom) -> None:
    """Wait until the request ring has room for a record, wherever the record begins in it."""
    # A record that does not fit in front of the ring's end leaves less than its own size there.
    needed = 2 * record_span(_size_of(parts))
    while channel.requests.free_bytes < needed:
        make_room()
        channel.waiter.wait_for_room(
            lambda: channel.has_data() or channel.requests.free_bytes >= needed
        )


def claim_slot(channel: ClientChannel, size: int, make_room: MakeRoom) -> Slot:
    """Wait for a free slot of so many bytes."""
    while (slot := channel.slots.claim(size)) is None:
        wait_for_slot(channel, make_room)
    return slot


def wait_for_slot(channel: ClientChannel, make_room: MakeRoom) -> None:
    """Wait for outputs for a moment; the engine releases slots meanwhile."""
    make_room()
    channel.wait(time.monotonic() + SLOT_WAIT_S)


def _put_in_slot(
    channel: ClientChannel, kind: RecordKind, parts: codec.Parts, make_room: MakeRoom
) -> codec.Parts:
    slot = claim_slot(channel, _size_of(parts), make_room)
    offset = 0
    for part in parts:
        slot.buffer[offset : offset + len(part)] = part
        offset += len(part)
    return codec.encode_in_slot(kind, slot.publish())


def _size_of(parts: codec.Parts) -> int:
    return sum(map(len, parts))
