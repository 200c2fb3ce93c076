"""The engine's end of a channel; `channel` describes channels."""

from __future__ import annotations

from shmllm.ipc import layout
from shmllm.ipc.channel import ChannelEnd
from shmllm.ipc.doorbell import open_doorbell
from shmllm.ipc.ring import BytesLike, RingWriter
from shmllm.ipc.ring_reader import RingReader
from shmllm.ipc.ring_statistics import StatisticsLine
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotWriter
from shmllm.ipc.states import ClientState
from shmllm.ipc.wait import wake_if_parked, wake_if_parked_for_any
from shmllm.ipc.words import Word


class CoreChannel(ChannelEnd):
    """The engine's end of the connection to one front end. It never waits; see `CoreWaiter`.

    Args:
        control: the engine's own control segment.
        client: the front end's segment.
        bell: the CLIENT segment whose doorbell wakes the front end; None: `client`.

    Attributes:
        slots: the reader of the tensor slots from the front end.
        output_slots: the writer of the tensor slots to the front end.
        requests: the reader of the request ring.
        outputs: the writer of the output ring.
    """

    def __init__(self, control: Segment, client: Segment, bell: Segment | None = None) -> None:
        control.check_usable()
        memory = client.buffer
        self.requests = RingReader.over(memory, layout.REQUEST_RING_LAYOUT)
        self.outputs = RingWriter.over(memory, layout.OUTPUT_RING_LAYOUT)
        bell = bell or client
        doorbell = bell.part(layout.CLIENT_DOORBELL_OFFSET, layout.DOORBELL_BYTES)
        super().__init__(
            client,
            self.outputs,
            self.requests,
            Word(bell.buffer, layout.CLIENT_PARKED_OFFSET),
            open_doorbell(doorbell),
        )
        self.slots = SlotReader(memory, layout.REQUEST_SLOT_LAYOUT)
        self.output_slots = SlotWriter(
            memory, layout.OUTPUT_SLOT_LAYOUT, client.allocate, client.discard
        )
        self._urgent = Word(memory, layout.OUTPUT_URGENT_OFFSET)
        self._request_stats = StatisticsLine(memory, layout.REQUEST_READER_STATS_OFFSET)
        self._output_stats = StatisticsLine(memory, layout.OUTPUT_WRITER_STATS_OFFSET)
        self._state = Word(memory, layout.CLIENT_STATE_OFFSET)

    def try_send(self, kind: int, *parts: BytesLike, is_urgent: bool = True) -> bool:
        """Publish an output and wake the front end if it sleeps.

        Args:
            kind: the number of the message's kind.
            parts: the parts of its payload, in order.
            is_urgent: also wake a front end that waits for an urgent output only. If the ring
                is at least half full, every output does that.

        Returns:
            False if the output ring has no room; then its records are the same as before. They
            all count as urgent from then on, because only the front end can make room. (Padding
            can fill a ring in which less than half of the bytes are in use.)

        Raises:
            MessageTooLargeError: the message does not fit even into an empty ring.
            SegmentError: the channel is closed, or this process is a forked child.
        """
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        is_written = self._try_write(kind, *parts)
        if is_urgent or not is_written or self.outputs.is_half_full:
            # SYNC POINT: record published. The record is published before this word, so a
            # reader that sees the word finds the record.
            self._urgent.store(self.outputs.position)
            wake_if_parked(self._peer_parked, self._peer_doorbell)
        else:
            wake_if_parked_for_any(self._peer_parked, self._peer_doorbell)
        return is_written

    def has_requests(self) -> bool:
        """Whether the request ring has an unread record."""
        return self.requests.has_data()

    @property
    def is_client_closing(self) -> bool:
        """Whether the front end stored any state but CONNECTED: CLOSING, or an invalid value.
        A killed front end leaves CONNECTED."""
        return self._state.load() != ClientState.CONNECTED

    def publish_statistics(self) -> None:
        """Copy this end's counters to shared memory."""
        self._request_stats.store(self.requests.statistics())
        self._output_stats.store(self.outputs.statistics())

    def close(self) -> None:
        """Release the views of the front end's segment, which the caller closes; idempotent."""
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
            self._peer_parked,
            self._peer_doorbell,
        ):
            part.close()
