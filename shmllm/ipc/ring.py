"""A ring of byte records with one writer and one reader, neither of which ever blocks.

Owns records and cursors; must not know what a record means or how anyone waits.

*position* counts bytes since the ring was made and only grows; *index* = position modulo
capacity. Records fill the half-open interval [consumed, published). The writer moves
`published`, the reader `consumed`. Each keeps its own cursor in a Python int, and the
writer also keeps the last `consumed` it saw, so that it reads the peer's cache line only
when the ring looks full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from shmllm.errors import MessageTooLargeError, ProtocolMismatchError
from shmllm.ipc.layout import (
    PADDING_KIND,
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    RingLayout,
)
from shmllm.ipc.ring_statistics import RingStatistics
from shmllm.ipc.words import PlainWord, Word

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

BytesLike: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"
Handler: TypeAlias = Callable[[int, memoryview], None]

_pack_header = RECORD_HEADER.pack_into
_unpack_header = RECORD_HEADER.unpack_from
_ROUND_UP = RECORD_HEADER_BYTES + RECORD_ALIGNMENT - 1
_ALIGNED = ~(RECORD_ALIGNMENT - 1)


class _RingEnd:
    """What both ends share: the memory and the cursors' words."""

    __slots__ = ("_capacity", "_consumed", "_data", "_mask", "_position", "_published")

    def __init__(
        self, data: memoryview, published: PlainWord, consumed: PlainWord, position: int
    ) -> None:
        capacity = len(data)
        if capacity < 4 * RECORD_HEADER_BYTES or capacity & (capacity - 1):
            raise ValueError(f"a ring's capacity is a power of two from 64 up, not {capacity}")
        self._data = data
        self._published = published
        self._consumed = consumed
        self._capacity = capacity
        self._mask = capacity - 1
        self._position = position

    @property
    def position(self) -> int:
        """Where this end stands: behind the last record that it wrote, or read."""
        return self._position

    def _used_bytes(self, published: int, consumed: int) -> int:
        used = published - consumed
        if not 0 <= used <= self._capacity or (published | consumed) % RECORD_ALIGNMENT:
            raise ProtocolMismatchError(
                f"ring cursors make no sense: published {published}, consumed {consumed}, "
                f"capacity {self._capacity}; the peer speaks another version or memory is damaged"
            )
        return used

    def close(self) -> None:
        """Let go of the segment; any later use raises ValueError."""
        self._data.release()
        self._published.close()
        self._consumed.close()


class RingWriter(_RingEnd):
    """The publishing end: `claim -> publish | abort_claim`, or `try_write` in one go.

    Args:
        data: the ring's bytes; their number is a power of two.
        published: written by this end.
        consumed: written by the reader.
    """

    __slots__ = (
        "_claim_end",
        "_claim_view",
        "_high_water_bytes",
        "_load_consumed",
        "_max_span",
        "_num_bytes",
        "_num_messages",
        "_seen_consumed",
        "_store_published",
        "_times_full",
    )

    def __init__(self, data: memoryview, published: PlainWord, consumed: PlainWord) -> None:
        super().__init__(data, published, consumed, published.load())
        self._store_published = published.store
        self._load_consumed = consumed.load
        self._seen_consumed = consumed.load()
        self._max_span = self._capacity // 2
        self._claim_end = 0
        self._claim_view: memoryview | None = None
        self._num_messages = self._num_bytes = 0
        self._times_full = self._high_water_bytes = 0
        self._used_bytes(self._position, self._seen_consumed)

    @classmethod
    def over(cls, buffer: memoryview, layout: RingLayout) -> RingWriter:
        """The writing end of a ring in a segment."""
        return cls(*parts_of(buffer, layout))

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload that an empty ring takes, wherever its cursor stands."""
        return self._max_span - RECORD_HEADER_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes not in use now, headers and padding included."""
        # SYNC POINT: record consumed. Room counts as free only after this load.
        self._seen_consumed = self._load_consumed()
        return self._capacity - self._used_bytes(self._position, self._seen_consumed)

    @property
    def is_half_full(self) -> bool:
        """Whether half of the bytes are in use; looks at the reader's cursor only if needed."""
        half = self._capacity // 2
        return self._position - self._seen_consumed >= half and self.free_bytes <= half

    def try_write(self, kind: int, *parts: BytesLike) -> bool:
        """Publish one record whose payload is `parts` put together.

        Args:
            kind: 0 up to, not including, `PADDING_KIND`.
            parts: bytes-like, C-contiguous, of any item type.

        Returns:
            False when there is no room now; nothing has changed then.

        Raises:
            MessageTooLargeError: it can never fit.
        """
        length = 0
        chunks = []
        for part in parts:
            chunk = part if type(part) is bytes else _flat(part)
            length += len(chunk)
            chunks.append(chunk)
        begin = self._reserve(kind, length)
        if begin is None:
            return False
        data = self._data
        for chunk in chunks:
            end = begin + len(chunk)
            data[begin:end] = chunk
            begin = end
        self._publish(length)
        return True

    def try_claim(self, kind: int, length: int) -> memoryview | None:
        """Room for a payload of `length` bytes to be filled in place, or None when full.

        The view is valid until `publish` or `abort_claim`, one of which must follow.

        Raises:
            MessageTooLargeError: it can never fit.
        """
        if self._claim_view is not None:
            raise RuntimeError("the previous claim was neither published nor aborted")
        begin = self._reserve(kind, length)
        if begin is None:
            return None
        self._claim_view = self._data[begin : begin + length]
        return self._claim_view

    def publish(self) -> None:
        """Make the claimed record visible to the reader."""
        self._publish(self._end_claim())

    def abort_claim(self) -> None:
        """Give the claimed room back; the reader sees nothing of it."""
        self._end_claim()

    def statistics(self) -> RingStatistics:
        """Counts since this end was made."""
        return RingStatistics(
            self._num_messages, self._num_bytes, self._times_full, self._high_water_bytes
        )

    def check_integrity(self) -> None:
        """Raise ProtocolMismatchError if somebody else moved the cursor or one is absurd."""
        published = self._published.load()
        if published != self._position:
            raise ProtocolMismatchError(
                f"the ring's writer stands at {self._position}, its word says {published}: "
                "two writers on one ring?"
            )
        self._used_bytes(published, self._load_consumed())

    def _reserve(self, kind: int, length: int) -> int | None:
        """Write the header (and padding) into free room; returns the payload's index."""
        span = (length + _ROUND_UP) & _ALIGNED
        if span > self._max_span:
            raise MessageTooLargeError(
                f"a message of {length} bytes exceeds the {self.max_payload_bytes} bytes that "
                "this ring can hold; split it or send it through a tensor slot"
            )
        if not 0 <= kind < PADDING_KIND:
            raise ValueError(f"message kind {kind} is outside 0..{PADDING_KIND - 1}")
        position = self._position
        index = position & self._mask
        to_end = self._capacity - index
        end = position + span if span <= to_end else position + to_end + span
        if end - self._seen_consumed > self._capacity and not self._has_room(end):
            self._times_full += 1
            return None
        if span > to_end:
            _pack_header(self._data, index, to_end - RECORD_HEADER_BYTES, PADDING_KIND, 0, position)
            position += to_end
            index = 0
        _pack_header(self._data, index, length, kind, 0, position)
        self._claim_end = end
        return index + RECORD_HEADER_BYTES

    def _has_room(self, end: int) -> bool:
        return end - self._position <= self.free_bytes

    def _publish(self, length: int) -> None:
        end = self._claim_end
        self._position = end
        self._num_messages += 1
        self._num_bytes += length
        used = end - self._seen_consumed
        if used > self._high_water_bytes:
            self._high_water_bytes = used
        # SYNC POINT: record published. Last of all, after header, padding and payload.
        self._store_published(end)

    def _end_claim(self) -> int:
        view = self._claim_view
        if view is None:
            raise RuntimeError("there is no claim to publish or to abort")
        self._claim_view = None
        length = len(view)
        # An array over the view may outlive it; the memory stays mapped, so that is harmless.
        with contextlib.suppress(BufferError):
            view.release()
        return length


class RingReader(_RingEnd):
    """The consuming end.

    Args:
        data: the ring's bytes; their number is a power of two.
        published: written by the writer.
        consumed: written by this end.
    """

    __slots__ = ("_draining", "_load_published", "_num_bytes", "_num_messages", "_store_consumed")

    def __init__(self, data: memoryview, published: PlainWord, consumed: PlainWord) -> None:
        super().__init__(data.toreadonly(), published, consumed, consumed.load())
        self._load_published = published.load
        self._store_consumed = consumed.store
        self._num_messages = self._num_bytes = 0
        self._draining = False

    @classmethod
    def over(cls, buffer: memoryview, layout: RingLayout) -> RingReader:
        """The reading end of a ring in a segment."""
        return cls(*parts_of(buffer, layout))

    def has_data(self) -> bool:
        """Whether `drain` would find a record."""
        # SYNC POINT: record published
        return self._load_published() != self._position

    def drain(self, handler: Handler, limit: int = 0) -> int:
        """Hand the records that are there to `handler(kind, payload)`, oldest first.

        The cursor moves once per batch, also when the handler raises, and then past the
        record that it raised on: a poisonous record is not met again.

        Args:
            handler: gets a read-only view that is valid until it returns; it copies what
                it keeps. An array over the view is not taken away: kept, it would show
                later records.
            limit: most records to handle, 0 for all.

        Returns:
            How many records were handled.

        Raises:
            ProtocolMismatchError: what lies there is no record. The cursor stays in front.
        """
        # SYNC POINT: record published. Header and payload are read only after this load.
        published = self._load_published()
        if published == self._position:
            return 0
        if self._draining:
            raise RuntimeError("drain was called from inside its own handler")
        self._used_bytes(published, self._position)
        self._draining = True
        num_before = self._num_messages
        end = num_before + limit if limit else None
        try:
            while self._position != published and self._num_messages != end:
                self._handle_one(handler, published)
        finally:
            self._draining = False
            # SYNC POINT: record consumed. After the last read of what it frees.
            self._store_consumed(self._position)
        return self._num_messages - num_before

    def _handle_one(self, handler: Handler, published: int) -> None:
        position = self._position
        data = self._data
        index = position & self._mask
        length, kind, flags, sequence = _unpack_header(data, index)
        span = (length + _ROUND_UP) & _ALIGNED
        if (
            sequence != position
            or flags
            or span > published - position
            or span > self._capacity - index
        ):
            raise self._not_a_record(length, kind, sequence)
        self._position = position + span
        if kind == PADDING_KIND:
            return
        self._num_messages += 1
        self._num_bytes += length
        begin = index + RECORD_HEADER_BYTES
        view = data[begin : begin + length]
        try:
            handler(kind, view)
        finally:
            view.release()

    def statistics(self) -> RingStatistics:
        """Counts since this end was made."""
        return RingStatistics(self._num_messages, self._num_bytes)

    def check_integrity(self) -> None:
        """Walk everything unread; raise ProtocolMismatchError at the first absurdity."""
        consumed = self._consumed.load()
        if consumed != self._position and not self._draining:
            raise ProtocolMismatchError(
                f"the ring's reader stands at {self._position}, its word says {consumed}: "
                "two readers on one ring?"
            )
        published = self._load_published()
        position = self._position
        self._used_bytes(published, position)
        while position < published:
            index = position & self._mask
            length, kind, _, sequence = _unpack_header(self._data, index)
            span = (length + _ROUND_UP) & _ALIGNED
            if sequence != position or span > min(published - position, self._capacity - index):
                raise self._not_a_record(length, kind, sequence)
            position += span

    def _not_a_record(self, length: int, kind: int, sequence: int) -> ProtocolMismatchError:
        return ProtocolMismatchError(
            f"no record at ring position {self._position}: length {length}, kind {kind}, "
            f"sequence {sequence}, capacity {self._capacity}; the peer speaks another version "
            "or memory is damaged"
        )


def _flat(part: BytesLike) -> bytes | memoryview:
    view = memoryview(part)  # type: ignore[arg-type]
    return view.cast("B") if view.nbytes else b""


def record_span(length: int) -> int:
    """Bytes of ring that a record with a payload of `length` bytes takes."""
    return (length + _ROUND_UP) & _ALIGNED


def parts_of(buffer: memoryview, layout: RingLayout) -> tuple[memoryview, PlainWord, PlainWord]:
    """(bytes, published, consumed) of a ring in a segment."""
    begin = layout.data_offset
    return (
        buffer[begin : begin + layout.capacity_bytes],
        Word(buffer, layout.published_offset),
        Word(buffer, layout.consumed_offset),
    )
