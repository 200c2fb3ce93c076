"""Channels: the two ends of one connection between a front end and its engine.

Owns how rings, slots, doorbells and waiting are put together; must not know what a record
means. Neither end decides that its peer is dead: no wait outlasts the park cap, and the
caller looks at `is_owned()` or a pidfd between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from shmllm.errors import IpcTimeoutError, SegmentError
from shmllm.ipc import layout
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.doorbell import open_doorbell_at
from shmllm.ipc.layout import ClientState, EngineState, Parked
from shmllm.ipc.ring import BytesLike, Handler, RingReader, RingWriter
from shmllm.ipc.ring_statistics import StatisticsLine
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotWriter
from shmllm.ipc.stats import Stat
from shmllm.ipc.wait import (
    Waiter,
    WaitPolicy,
    ring_if_parked,
    ring_if_parked_for_any,
    ring_if_parked_for_room,
)
from shmllm.ipc.watching import RecordWatcher, watched_draining, watched_writing
from shmllm.ipc.words import Word

__all__ = ["ClientChannel", "ControlPage", "ControlView", "CoreChannel", "CoreWaiter"]

LOOK_S = 0.01
"""What is not urgent waits at most this long for a front end that waits for what is."""


class _Channel:
    """What both ends share: the guard in front of the client's segment, and who watches."""

    __slots__ = ("_client", "_drain", "_is_closed", "_reader", "_try_write", "_writer")

    def __init__(self, client: Segment, writer: RingWriter, reader: RingReader) -> None:
        self._client = client
        self._is_closed = False
        self._writer = writer
        self._reader = reader
        self.watch(None)

    @property
    def nonce(self) -> int:
        """Tells this connection from all others; both ends have the same."""
        return self._client.nonce

    def watch(self, watcher: RecordWatcher | None) -> None:
        """Have each record shown to a watcher from now on; None: to nobody."""
        self._try_write: Callable[..., bool] = self._writer.try_write
        self._drain: Callable[..., int] = self._reader.drain
        if watcher is not None:
            self._try_write = watched_writing(self._writer, watcher)
            self._drain = watched_draining(self._reader, watcher)

    def _refuse(self) -> NoReturn:
        self._client.check_usable()
        raise SegmentError("this channel is closed")


class ClientChannel(_Channel):
    """The front end's end.

    Args:
        control: the engine's segment.
        client: this front end's own segment.
        policy: how to wait for outputs.

    Attributes:
        slots: tensors to the engine.
        output_slots: tensors from the engine.
        requests: the request ring's writing end.
        outputs: the output ring's reading end.
    """

    def __init__(self, control: Segment, client: Segment, policy: WaitPolicy) -> None:
        memory, shared = client.buffer, control.buffer
        self.requests = RingWriter.over(memory, layout.REQUEST_RING_LAYOUT)
        self.outputs = RingReader.over(memory, layout.OUTPUT_RING_LAYOUT)
        super().__init__(client, self.requests, self.outputs)
        self._has_data = self.outputs.has_data
        self._urgent = Word(memory, layout.OUTPUT_URGENT_OFFSET)
        self._saw_nothing = False
        self.slots = SlotWriter(memory, layout.REQUEST_SLOT_LAYOUT, client.allocate, client.discard)
        self.output_slots = SlotReader(memory, layout.OUTPUT_SLOT_LAYOUT)
        self._control = ControlView(control)
        self._state = Word(memory, layout.CLIENT_STATE_OFFSET)
        self._parked = Word(memory, layout.CLIENT_PARKED_OFFSET)
        self._doorbell = open_doorbell_at(memory, layout.CLIENT_DOORBELL_OFFSET)
        self._request_stats = StatisticsLine(memory, layout.REQUEST_WRITER_STATS_OFFSET)
        self._output_stats = StatisticsLine(memory, layout.OUTPUT_READER_STATS_OFFSET)
        self._waiter = Waiter(self._parked, self._doorbell, policy, self.publish_statistics)
        self._core_parked = Word(shared, layout.CONTROL_PARKED_OFFSET)
        self._core_doorbell = open_doorbell_at(shared, layout.CONTROL_DOORBELL_OFFSET)

    def try_send(self, kind: int, *parts: BytesLike) -> bool:
        """Publish a request and wake the engine if it sleeps; False when there is no room.

        Raises:
            MessageTooLargeError: it can never fit.
            SegmentError: the channel was closed, or this is a forked child.
        """
        if self._is_closed or not self._client.is_usable:
            self._refuse()
        if not self._try_write(kind, *parts):
            return False
        ring_if_parked(self._core_parked, self._core_doorbell)
        return True

    def send(
        self,
        kind: int,
        *parts: BytesLike,
        on_full: Callable[[], None],
        deadline: float | None,
    ) -> None:
        """Publish a request, waiting for room.

        Args:
            kind: of the message.
            parts: of its payload.
            on_full: called before each wait. It has to drain outputs, or an engine that
                waits for room there and this end block each other, and to raise if the
                engine is dead.
            deadline: on `time.monotonic()`; None leaves the end to `on_full`.

        Raises:
            IpcTimeoutError: no room by the deadline.
        """
        while not self.try_send(kind, *parts):
            on_full()
            if deadline is not None and time.monotonic() >= deadline:
                raise IpcTimeoutError(
                    f"the engine made no room for a request in time: {self.requests.free_bytes} "
                    f"of {layout.RING_BYTES} bytes are free in the request ring"
                )
            free = self.requests.free_bytes
            self._waiter.wait(
                lambda free=free: self._has_data() or self.requests.free_bytes > free,  # type: ignore[misc]
                reason=Parked.FOR_ROOM,
            )

    def drain(self, handler: Handler, limit: int = 0) -> int:
        """Handle the outputs that are there; see `RingReader.drain`."""
        if self._is_closed or not self._client.is_usable:
            self._refuse()
        num_handled = self._drain(handler, limit)
        if num_handled:
            ring_if_parked_for_room(self._core_parked, self._core_doorbell)
        return num_handled

    def wait(self, deadline_s: float | None = None, *, urgent_only: bool = False) -> bool:
        """Wait until there are outputs; returns whether there are.

        Comes back after one park at the latest, so that the caller can see whether the
        engine lives.

        Args:
            deadline_s: on `time.monotonic()`; None for no earlier end than the park's.
            urgent_only: wait for an urgent output, and look at the others after LOOK_S. If
                there is nothing then, the next wait is for any: they come slowly.
        """
        if self._is_closed or not self._client.is_usable:
            self._refuse()
        if self.slots.has_excess:
            self.slots.reclaim()
        cap_s = self._waiter.park_cap_s
        if deadline_s is not None:
            cap_s = min(deadline_s - time.monotonic(), cap_s)
        if cap_s <= 0:
            return self._has_data()
        if urgent_only and not self._saw_nothing:
            self._waiter.wait(self._has_urgent, min(cap_s, LOOK_S), Parked.FOR_URGENT)
            self._saw_nothing = not self._has_data()
            return not self._saw_nothing
        self._saw_nothing = False
        return self._waiter.wait(self._has_data, cap_s)

    def _has_urgent(self) -> bool:
        # SYNC POINT: record published
        return self._has_data() and self._urgent.load() > self.outputs.position

    def set_policy(self, policy: WaitPolicy) -> None:
        """Wait like this from now on."""
        self._waiter.set_policy(policy)

    def publish_statistics(self) -> None:
        """Show what this end has counted; also done before each park."""
        self._request_stats.store(self.requests.statistics())
        outputs = self.outputs.statistics()
        self._output_stats.store(replace(outputs, times_parked=self._waiter.times_parked))

    @property
    def engine_state(self) -> EngineState:
        """What the engine says about itself; a killed one says nothing more."""
        return self._control.engine_state

    def describe_engine(self) -> str:
        """The engine's state in words; see `ControlView.describe`."""
        return self._control.describe()

    @property
    def engine_pid(self) -> int:
        """The engine's pid in its own namespace, 0 before it attached."""
        return self._control.engine_pid

    @property
    def heartbeat_ns(self) -> int:
        """When the engine last beat, on `time.monotonic_ns()`; 0 before the first time."""
        return self._control.heartbeat_ns

    def stat(self, stat: Stat) -> int:
        """One number from the statistics page."""
        return self._control.stat(stat)

    def stats(self) -> dict[str, int]:
        """All statistics, by lower-case name."""
        return self._control.stats()

    def last_words(self) -> str:
        """Why the engine died, if it could still say so."""
        return self._control.last_words()

    def knock(self, place: int, nonce: int) -> None:
        """Ask a named engine to let this front end into the place that it claimed."""
        self._client.check_usable()
        self._control.say_hello(place, nonce)
        ring_if_parked(self._core_parked, self._core_doorbell)

    def wake(self) -> None:
        """End this end's own park, in which another thread waits; else the next one."""
        if not self._is_closed and self._client.is_usable:
            self._doorbell.post()

    def set_closing(self) -> None:
        """Tell the engine that this front end is leaving."""
        if self._is_closed or not self._client.is_usable:
            self._refuse()
        self._state.store(ClientState.CLOSING)
        ring_if_parked(self._core_parked, self._core_doorbell)

    def close(self) -> None:
        """Let go of both segments, which stay the caller's to close; idempotent."""
        if not self._is_closed and self._client.is_usable:
            self.publish_statistics()
        self._is_closed = True
        for part in (
            self.requests,
            self.outputs,
            self.slots,
            self.output_slots,
            self._control,
            self._request_stats,
            self._output_stats,
            self._state,
            self._urgent,
            self._parked,
            self._core_parked,
            self._doorbell,
            self._core_doorbell,
        ):
            part.close()


class CoreChannel(_Channel):
    """The engine's end of one front end's connection. It never waits; see `CoreWaiter`.

    Args:
        control: the engine's own segment.
        client: the front end's segment.

    Attributes:
        slots: tensors from the front end.
        output_slots: tensors to the front end.
        requests: the request ring's reading end.
        outputs: the output ring's writing end.
    """

    def __init__(self, control: Segment, client: Segment) -> None:
        control.check_usable()
        memory = client.buffer
        self.requests = RingReader.over(memory, layout.REQUEST_RING_LAYOUT)
        self.outputs = RingWriter.over(memory, layout.OUTPUT_RING_LAYOUT)
        super().__init__(client, self.outputs, self.requests)
        self.slots = SlotReader(memory, layout.REQUEST_SLOT_LAYOUT)
        self.output_slots = SlotWriter(
            memory, layout.OUTPUT_SLOT_LAYOUT, client.allocate, client.discard
        )
        self._urgent = Word(memory, layout.OUTPUT_URGENT_OFFSET)
        self._request_stats = StatisticsLine(memory, layout.REQUEST_READER_STATS_OFFSET)
        self._output_stats = StatisticsLine(memory, layout.OUTPUT_WRITER_STATS_OFFSET)
        self._state = Word(memory, layout.CLIENT_STATE_OFFSET)
        self._parked = Word(memory, layout.CLIENT_PARKED_OFFSET)
        self._doorbell = open_doorbell_at(memory, layout.CLIENT_DOORBELL_OFFSET)

    def try_send(self, kind: int, *parts: BytesLike, is_urgent: bool = True) -> bool:
        """Publish an output and wake the front end if it sleeps; False when there is no room.

        Args:
            kind: of the message.
            parts: of its payload.
            is_urgent: wake it even if it sleeps until something urgent comes. So does what
                is not, once the ring is half full.

        Raises:
            MessageTooLargeError: it can never fit.
            SegmentError: the channel was closed, or this is a forked child.
        """
        if self._is_closed or not self._client.is_usable:
            self._refuse()
        if not self._try_write(kind, *parts):
            return False
        if is_urgent or self.outputs.is_half_full:
            # SYNC POINT: record published. The reader finds the record that this announces.
            self._urgent.store(self.outputs.position)
            ring_if_parked(self._parked, self._doorbell)
        else:
            ring_if_parked_for_any(self._parked, self._doorbell)
        return True

    def drain(self, handler: Handler, limit: int = 0) -> int:
        """Handle the requests that are there; see `RingReader.drain`."""
        if self._is_closed or not self._client.is_usable:
            self._refuse()
        num_handled = self._drain(handler, limit)
        if num_handled:
            ring_if_parked_for_room(self._parked, self._doorbell)
        return num_handled

    def has_requests(self) -> bool:
        """Whether there are any: what the engine's `ready()` asks of each channel."""
        return self.requests.has_data()

    @property
    def is_client_closing(self) -> bool:
        """Whether the front end said that it leaves; a killed one says nothing. A word that
        means nothing counts as leaving."""
        return self._state.load() != ClientState.CONNECTED

    def publish_statistics(self) -> None:
        """Show what this end has counted."""
        self._request_stats.store(self.requests.statistics())
        self._output_stats.store(self.outputs.statistics())

    def is_client_alive(self) -> bool:
        """Whether some process holds the front end's ownership lock."""
        return self._client.is_owned()

    def close(self) -> None:
        """Let go of the front end's segment, which stays the caller's to close; idempotent."""
        self._is_closed = True
        for part in (
            self.requests,
            self.outputs,
            self.slots,
            self.output_slots,
            self._request_stats,
            self._output_stats,
            self._state,
            self._urgent,
            self._parked,
            self._doorbell,
        ):
            part.close()
