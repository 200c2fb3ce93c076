"""A ring buffer of byte records with one writer and one reader, neither of which ever blocks.

This module owns the cursors and the writer's end; `ring_reader` has the other end. It must not know
the meaning of a record, nor how the two ends wait.

A *position* counts the bytes since the creation of the ring and only grows; *index* = position
modulo capacity. The unread records fill the half-open interval [consumed, published). The writer
moves `published`, the reader `consumed`. Each end keeps its own cursor in a Python int. The writer
also keeps the last value of `consumed` that it loaded, so that it loads the reader's cache line
only when the ring looks full.
"""

from __future__ import annotations

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

_pack_header = RECORD_HEADER.pack_into
ROUND_UP = RECORD_HEADER_BYTES + RECORD_ALIGNMENT - 1
ALIGNED = ~(RECORD_ALIGNMENT - 1)
"""A record with a payload of n bytes takes (n + ROUND_UP) & ALIGNED bytes of the ring."""
# No ring lives to see position 2**63, and beyond 2**64 a cursor could not be stored.
_IMPOSSIBLE_BITS = (RECORD_ALIGNMENT - 1) | 1 << 63


class RingEnd:
    """The base of both ends: the memory and the words of the two cursors."""

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
        """The position of this end: the end of the last record that it wrote or read."""
        return self._position

    def _used_bytes(self, published: int, consumed: int) -> int:
        used = published - consumed
        if not 0 <= used <= self._capacity or (published | consumed) & _IMPOSSIBLE_BITS:
            raise ProtocolMismatchError(
                f"ring cursors make no sense: published {published}, consumed {consumed}, "
                f"capacity {self._capacity}; the peer speaks another version or memory is damaged"
            )
        return used

    def close(self) -> None:
        """Release the views of the segment; any later use raises ValueError."""
        self._data.release()
        self._published.close()
        self._consumed.close()


class RingWriter(RingEnd):
    """The end that writes and publishes records.

    Args:
        data: the ring's bytes; their number is a power of two.
        published: the word with the writer's cursor, which this end stores.
        consumed: the word with the reader's cursor, which this end only loads.
    """

    __slots__ = (
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
        self._num_messages = self._num_bytes = 0
        self._times_full = self._high_water_bytes = 0
        self._used_bytes(self._position, self._seen_consumed)

    @classmethod
    def over(cls, buffer: memoryview, layout: RingLayout) -> RingWriter:
        """The writer of a ring in a segment."""
        return cls(*parts_of(buffer, layout))

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload in bytes that fits into an empty ring at every cursor position."""
        return self._max_span - RECORD_HEADER_BYTES

    @property
    def free_bytes(self) -> int:
        """The free bytes of the ring now; headers and padding count as used."""
        # SYNC POINT: record consumed. The writer may reuse bytes only after this load.
        consumed = self._load_consumed()
        used = self._used_bytes(self._position, consumed)
        self._seen_consumed = consumed
        return self._capacity - used

    @property
    def consumed_position(self) -> int:
        """The reader's cursor, unchecked: a value to compare with an earlier one."""
        return self._load_consumed()

    @property
    def is_half_full(self) -> bool:
        """Whether at least half of the bytes are in use. Loads the reader's cursor only if its
        last known value cannot answer the question."""
        half = self._capacity // 2
        return self._position - self._seen_consumed >= half and self.free_bytes <= half

    def try_write(self, kind: int, *parts: BytesLike) -> bool:
        """Publish one record whose payload is the concatenation of `parts`.

        Args:
            kind: the record's kind, from 0 to `PADDING_KIND` - 1.
            parts: C-contiguous bytes-like objects of any item type.

        Returns:
            False if the ring has no room now; then nothing has changed.

        Raises:
            MessageTooLargeError: the record does not fit even into an empty ring.
        """
        length = 0
        chunks = []
        for part in parts:
            chunk = part if type(part) is bytes else _flat(part)
            length += len(chunk)
            chunks.append(chunk)
        reserved = self._reserve(kind, length)
        if reserved is None:
            return False
        begin, end_position = reserved
        data = self._data
        for chunk in chunks:
            end = begin + len(chunk)
            data[begin:end] = chunk
            begin = end
        self._publish(length, end_position)
        return True

    def statistics(self) -> RingStatistics:
        """The counters since the creation of this object."""
        return RingStatistics(
            self._num_messages, self._num_bytes, self._times_full, self._high_water_bytes
        )

    def check_integrity(self) -> None:
        """Raise ProtocolMismatchError if another writer moved the cursor, or if the cursors are
        not possible. Tests call this."""
        published = self._published.load()
        if published != self._position:
            raise ProtocolMismatchError(
                f"the ring's writer is at position {self._position}, but its word is {published}: "
                "two writers on one ring?"
            )
        self._used_bytes(published, self._load_consumed())

    def _reserve(self, kind: int, length: int) -> tuple[int, int] | None:
        """Write a header, and a padding record if necessary, into free bytes of the ring.

        Returns:
            (index of the payload, position of the record's end); None if the ring has no room.
        """
        span = (length + ROUND_UP) & ALIGNED
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
        return index + RECORD_HEADER_BYTES, end

    def _has_room(self, end: int) -> bool:
        return end - self._position <= self.free_bytes

    def _publish(self, length: int, end: int) -> None:
        self._position = end
        self._num_messages += 1
        self._num_bytes += length
        used = end - self._seen_consumed
        if used > self._high_water_bytes:
            self._high_water_bytes = used
        # SYNC POINT: record published. The last store, after header, padding and payload.
        self._store_published(end)


def _flat(part: BytesLike) -> bytes | memoryview:
    view = memoryview(part)  # type: ignore[arg-type]
    return view.cast("B") if view.nbytes else b""


def record_span(length: int) -> int:
    """Bytes of the ring that a record with a payload of `length` bytes takes."""
    return (length + ROUND_UP) & ALIGNED


def parts_of(buffer: memoryview, layout: RingLayout) -> tuple[memoryview, PlainWord, PlainWord]:
    """(bytes, published, consumed) of a ring in a segment."""
    begin = layout.data_offset
    return (
        buffer[begin : begin + layout.capacity_bytes],
        Word(buffer, layout.published_offset),
        Word(buffer, layout.consumed_offset),
    )
