"""The front end's end of a channel; `channel` describes channels."""

from __future__ import annotations

import time
from collections.abc import Callable

from shmllm.errors import IpcTimeoutError
from shmllm.ipc import layout
from shmllm.ipc.channel import ChannelEnd
from shmllm.ipc.control import ControlView
from shmllm.ipc.core_waiter import core_doorbell
from shmllm.ipc.error_log import LoggedError
from shmllm.ipc.output_waiter import OutputWaiter
from shmllm.ipc.ring import BytesLike, RingWriter
from shmllm.ipc.ring_reader import Decode, RingReader
from shmllm.ipc.ring_statistics import StatisticsLine
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotWriter
from shmllm.ipc.states import ClientState, EngineState
from shmllm.ipc.stats import Stat
from shmllm.ipc.wait import WaitPolicy, wake_if_parked, wake_if_parked_for_room
from shmllm.ipc.words import Word

STATISTICS_PERIOD_NS = 10_000_000
"""The shortest time between two parks that publish statistics, which takes longer than a park."""


class ClientChannel(ChannelEnd):
    """The front end's end of a connection.

    Args:
        control: the engine's control segment.
        client: this front end's own segment.
        policy: the wait policy for outputs.
        waiter: waits for outputs, also those of other channels; then `policy` is not used. None:
            this channel has its own.

    Attributes:
        waiter: waits for outputs.
        owns_waiter: whether that is this channel's own one.
        slots: the writer of the tensor slots to the engine.
        output_slots: the reader of the tensor slots from the engine.
        requests: the writer of the request ring.
        outputs: the reader of the output ring.
    """

    def __init__(
        self,
        control: Segment,
        client: Segment,
        policy: WaitPolicy,
        waiter: OutputWaiter | None = None,
    ) -> None:
        memory = client.buffer
        self.requests = RingWriter.over(memory, layout.REQUEST_RING_LAYOUT)
        self.outputs = RingReader.over(memory, layout.OUTPUT_RING_LAYOUT)
        core_parked = Word(control.buffer, layout.CONTROL_PARKED_OFFSET)
        super().__init__(client, self.requests, self.outputs, core_parked, core_doorbell(control))
        self._has_data = self.outputs.has_data
        self._urgent = Word(memory, layout.OUTPUT_URGENT_OFFSET)
        self.slots = SlotWriter(memory, layout.REQUEST_SLOT_LAYOUT, client.allocate, client.discard)
        self.output_slots = SlotReader(memory, layout.OUTPUT_SLOT_LAYOUT)
        self._control = ControlView(control)
        self._state = Word(memory, layout.CLIENT_STATE_OFFSET)
        self._heartbeat = Word(memory, layout.CLIENT_HEARTBEAT_OFFSET)
        self._request_stats = StatisticsLine(memory, layout.REQUEST_WRITER_STATS_OFFSET)
        self._output_stats = StatisticsLine(memory, layout.OUTPUT_READER_STATS_OFFSET)
        self._published_ns = 0
        self.owns_waiter = waiter is None
        self.waiter = OutputWaiter(client, policy) if waiter is None else waiter
        self.waiter.on_park.append(self._before_park)

    def try_send(self, kind: int, *parts: BytesLike) -> bool:
        """Publish a request and wake the engine if it sleeps.

        Args:
            kind: the number of the message's kind.
            parts: the parts of its payload, in order.

        Returns:
            False if the request ring has no room; then nothing has changed.

        Raises:
            MessageTooLargeError: the message does not fit even into an empty ring.
            SegmentError: the channel is closed, or this process is a forked child.
        """
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        if not self._try_write(kind, *parts):
            return False
        wake_if_parked(self._peer_parked, self._peer_doorbell)
        return True

    def send(
        self,
        kind: int,
        *parts: BytesLike,
        on_full: Callable[[], None],
        deadline: float | None,
    ) -> None:
        """Publish a request; wait for room if the request ring is full.

        Args:
            kind: the number of the message's kind.
            parts: the parts of its payload, in order.
            on_full: called before each wait. It must drain the output ring, because otherwise
                this end and an engine that waits for room in the output ring block each other.
                It must raise an error if the engine is dead.
            deadline: a time on `time.monotonic()`; None: only an error of `on_full` ends the
                wait.

        Raises:
            IpcTimeoutError: the ring had no room until the deadline.
        """
        while not self.try_send(kind, *parts):
            on_full()
            if deadline is not None and time.monotonic() >= deadline:
                raise IpcTimeoutError(
                    f"the engine made no room for a request in time: {self.requests.free_bytes} "
                    f"of {layout.RING_BYTES} bytes are free in the request ring"
                )
            free = self.requests.free_bytes
            self.waiter.wait_for_room(
                lambda free=free: self._has_data() or self.requests.free_bytes > free  # type: ignore[misc]
            )

    def receive(self, decode: Decode) -> int:
        """Read each unread output exactly once, also if exceptions of signal handlers end this
        call; see `RingReader.receive`.

        Args:
            decode: as there. The third value that it returns is the SlotRef from which it took
                the message, or None. This method releases that slot.
        """
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        num_bytes = self._receive(decode, self.output_slots.release)
        if num_bytes:
            wake_if_parked_for_room(self._peer_parked, self._peer_doorbell)
        return num_bytes

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def wait(self, deadline_s: float | None = None, *, urgent_only: bool = False) -> bool:
        """Wait until the output ring has an unread record.

        The call parks at most once, so the caller regularly gets the chance to check whether
        the engine is alive.

        Args:
            deadline_s: a time on `time.monotonic()`; None: only the park cap bounds the wait.
            urgent_only: wait for an urgent output for a while; see `OutputWaiter.wait`.

        Returns:
            Whether the output ring has an unread record.
        """
        self.before_wait()
        has_urgent = self.has_urgent if urgent_only else None
        return self.waiter.wait(self._has_data, has_urgent, deadline_s)

    def before_wait(self) -> None:
        """Free the memory of slots that nobody uses any more. A wait calls this first.

        Raises:
            SegmentError: the channel is closed, or this process is a forked child.
        """
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        if self.slots.has_excess:
            self.slots.reclaim()

    def has_data(self) -> bool:
        """Whether the output ring has an unread record."""
        return self._has_data()

    def has_urgent(self) -> bool:
        """Whether it has an urgent one."""
        # SYNC POINT: record published
        return self._has_data() and self._urgent.load() > self.outputs.position

    def beat(self) -> None:
        """Store the current time as the heartbeat of this front end; each park does this as well.
        `client_state` tells from it whether a front end that has unread outputs hangs."""
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        self._heartbeat.store(time.monotonic_ns())

    def _before_park(self) -> None:
        self.beat()
        now_ns = time.monotonic_ns()
        if now_ns - self._published_ns > STATISTICS_PERIOD_NS:
            self._published_ns = now_ns
            self.publish_statistics()

    def publish_statistics(self) -> None:
        """Copy this end's counters to shared memory; a park does this as well, if the last one
        that did was more than `STATISTICS_PERIOD_NS` ago."""
        self._request_stats.store(self.requests.statistics())
        outputs = self.outputs.statistics()
        self._output_stats.store(outputs._replace(times_parked=self.waiter.times_parked))

    @property
    def engine_state(self) -> EngineState:
        """The last state that the engine stored; a killed engine does not update it."""
        return self._control.engine_state

    def describe_engine(self) -> str:
        """The engine's state in words; see `ControlView.describe`."""
        return self._control.describe()

    def stat(self, stat: Stat) -> int:
        """One value of the engine's statistics."""
        return self._control.stat(stat)

    def stats(self) -> dict[str, int]:
        """All values of the engine's statistics, by the lower-case name of the Stat."""
        return self._control.stats()

    def last_words(self) -> str:
        """The cause of the engine's death, or "" if the engine could not store one."""
        return self._control.last_words()

    def engine_errors(self) -> list[LoggedError]:
        """The distinct errors that the engine has recorded, the latest one last."""
        return self._control.errors()

    def say_hello(self, place: int, nonce: int) -> None:
        """Ask a named engine to accept this front end in the place that it claimed."""
        self._client.check_usable()
        self._control.say_hello(place, nonce)
        wake_if_parked(self._peer_parked, self._peer_doorbell)

    def repeat_hello(self, place: int, nonce: int) -> None:
        """Say hello again if a faulty front end has overwritten the word."""
        if self._control.hello(place) != nonce:
            self.say_hello(place, nonce)

    def wake(self) -> None:
        """Wake the thread of this process that waits on this channel; if none waits, the next
        park ends at once."""
        if not self._is_closed and self._client.is_usable:
            self.waiter.wake()

    def set_closing(self) -> None:
        """Tell the engine that this front end closes the connection."""
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        self._state.store(ClientState.CLOSING)
        wake_if_parked(self._peer_parked, self._peer_doorbell)

    def close(self) -> None:
        """Release the views of both segments, which the caller closes itself; idempotent."""
        if not self._is_closed and self._client.is_usable:
            self.publish_statistics()
        self._is_closed = True
        if self._before_park in self.waiter.on_park:
            self.waiter.on_park.remove(self._before_park)
        if self.owns_waiter:
            self.waiter.close()
        for part in (
            self.requests,
            self.outputs,
            self.slots,
            self.output_slots,
            self._control,
            self._request_stats,
            self._output_stats,
            self._state,
            self._heartbeat,
            self._urgent,
            self._peer_parked,
            self._peer_doorbell,
        ):
            part.close()
