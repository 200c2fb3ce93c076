"""Our own transport: `shmllm.ipc`'s channels, in one wait policy.

Owns how the benchmark drives a channel, which is how `EngineClient` and `EngineProcess`
do: drain, and if nothing came wait and drain again. What no ring record can hold goes
through a tensor slot. Must not know what a message means.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any

from shmllm.bench.loads import Parts
from shmllm.bench.transports import FdHandle, Take, Transport
from shmllm.ipc.channel import ClientChannel, CoreChannel, CoreWaiter
from shmllm.ipc.layout import SegmentKind
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotRef, SlotWriter
from shmllm.ipc.wait import WaitPolicy

IN_RING, IN_SLOT = 1, 2
REFERENCE = Struct("<QQQ")


class ShmLink:
    """One end of a channel.

    Args:
        channel: the front end's or the core's.
        wait: waits once for messages.
        outgoing: tensor slots to write.
        incoming: tensor slots to read.
        segments: closed with the link.
    """

    def __init__(
        self,
        channel: ClientChannel | CoreChannel,
        wait: Callable[[], bool],
        outgoing: SlotWriter,
        incoming: SlotReader,
        segments: tuple[Segment, Segment],
    ) -> None:
        writer = channel.requests if isinstance(channel, ClientChannel) else channel.outputs
        self._channel = channel
        self._try_send = channel.try_send
        self._drain = channel.drain
        self._wait = wait
        self._outgoing = outgoing
        self._incoming = incoming
        self._segments = segments
        self._most_in_ring = writer.max_payload_bytes
        self._take: Take = bytes
        self._result = b""

    def send(self, parts: Parts) -> None:
        if len(parts[0]) > self._most_in_ring:
            parts = self._to_slot(parts)
            kind = IN_SLOT
        else:
            kind = IN_RING
        while not self._try_send(kind, *parts):
            os.sched_yield()

    def receive(self, take: Take) -> bytes:
        self._take = take
        while not self._drain(self._handle, 1):
            self._wait()
        return self._result

    def greet(self) -> None:
        pass

    def close(self) -> None:
        self._channel.close()
        for segment in self._segments:
            segment.close()

    def _handle(self, kind: int, record: memoryview) -> None:
        if kind == IN_RING:
            self._result = self._take(record)
            return
        ref = SlotRef(*REFERENCE.unpack(record))
        with self._incoming.view(ref) as view:
            self._result = self._take(view)
        self._incoming.release(ref)

    def _to_slot(self, parts: Parts) -> Parts:
        (message,) = parts
        while (slot := self._outgoing.claim(len(message))) is None:
            os.sched_yield()
        slot.buffer[:] = message  # type: ignore[assignment]
        return (REFERENCE.pack(*slot.publish()),)


def open_shm(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """The front end's end, and what the core needs. The option names a wait policy."""
    control, client = Segment.create(SegmentKind.CONTROL), Segment.create(SegmentKind.CLIENT)
    channel = ClientChannel(control, client, WaitPolicy.named(option))
    transport = ShmLink(
        channel, channel.wait, channel.slots, channel.output_slots, (control, client)
    )
    return transport, (option, FdHandle(control.fd), FdHandle(client.fd))


def attach_shm(option: str, control_fd: FdHandle, client_fd: FdHandle) -> Transport:
    """The core's end."""
    control = Segment.attach(control_fd.fd, SegmentKind.CONTROL)
    client = Segment.attach(client_fd.fd, SegmentKind.CLIENT)
    channel = CoreChannel(control, client)
    waiter = CoreWaiter(control, WaitPolicy.named(option))
    wait = partial(waiter.wait, channel.has_requests, True)
    return ShmLink(channel, wait, channel.output_slots, channel.slots, (control, client))
