"""shmllm's own transport: the channels of `shmllm.ipc`, with one wait policy.

This module owns how the benchmark drives a channel, in the same way as `EngineClient` and
`EngineProcess`: it drains the ring, and if the ring was empty it waits and drains again. A message
that exceeds a ring record goes through a tensor slot. The module must not know the content of a
message.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any

from shmllm.bench.loads import Parts
from shmllm.bench.transports import Decode, FdHandle, Transport
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotRef, SlotWriter
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.wait import WaitPolicy

IN_RING, IN_SLOT = 1, 2
REFERENCE = Struct("<QQQ")


class ShmTransport:
    """One end of a channel.

    Args:
        channel: the front end's or the core's channel.
        wait: waits once for messages.
        outgoing: the tensor slots that this end writes.
        incoming: the tensor slots that this end reads.
        segments: the control and client segments; `close` closes them.
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
        self._max_ring_bytes = writer.max_payload_bytes
        self._decode: Decode = bytes
        self._result = b""

    def send(self, parts: Parts) -> None:
        if len(parts[0]) > self._max_ring_bytes:
            parts = self._to_slot(parts)
            kind = IN_SLOT
        else:
            kind = IN_RING
        while not self._try_send(kind, *parts):
            os.sched_yield()

    def receive(self, decode: Decode) -> bytes:
        self._decode = decode
        while not self._drain(self._handle, 1):
            self._wait()
        return self._result

    def handshake(self) -> None:
        pass

    def close(self) -> None:
        self._channel.close()
        for segment in self._segments:
            segment.close()

    def _handle(self, kind: int, record: memoryview) -> None:
        if kind == IN_RING:
            self._result = self._decode(record)
            return
        ref = SlotRef(*REFERENCE.unpack(record))
        with self._incoming.view(ref) as view:
            self._result = self._decode(view)
        self._incoming.release(ref)

    def _to_slot(self, parts: Parts) -> Parts:
        (message,) = parts
        while (slot := self._outgoing.claim(len(message))) is None:
            os.sched_yield()
        slot.buffer[:] = message  # type: ignore[assignment]
        return (REFERENCE.pack(*slot.publish()),)


def open_shm(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """Opens the front end's end; also returns the handles for the core.

    Args:
        option: the name of the wait policy.
        directory: not used.
    """
    control, client = Segment.create(SegmentKind.CONTROL), Segment.create(SegmentKind.CLIENT)
    channel = ClientChannel(control, client, WaitPolicy.named(option))
    transport = ShmTransport(
        channel, channel.wait, channel.slots, channel.output_slots, (control, client)
    )
    return transport, (option, FdHandle(control.fd), FdHandle(client.fd))


def attach_shm(option: str, control_fd: FdHandle, client_fd: FdHandle) -> Transport:
    """Opens the core's end."""
    control = Segment.attach(control_fd.fd, SegmentKind.CONTROL)
    client = Segment.attach(client_fd.fd, SegmentKind.CLIENT)
    channel = CoreChannel(control, client)
    waiter = CoreWaiter(control, WaitPolicy.named(option))
    wait = partial(waiter.wait, channel.has_requests, True)
    return ShmTransport(channel, wait, channel.output_slots, channel.slots, (control, client))
