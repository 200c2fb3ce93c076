"""The reader's end of a ring buffer; `ring` describes the ring.

A reader believes nothing that it reads: the writer may be faulty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.layout import PADDING_KIND, RECORD_HEADER, RECORD_HEADER_BYTES, RingLayout
from shmllm.ipc.ring import ALIGNED, ROUND_UP, RingEnd, parts_of
from shmllm.ipc.ring_statistics import RingStatistics
from shmllm.ipc.words import PlainWord

Handler: TypeAlias = Callable[[int, memoryview], None]
Decode: TypeAlias = Callable[[int, memoryview], tuple[Any, Callable[[Any], object], Any]]

_unpack_header = RECORD_HEADER.unpack_from


class RingReader(RingEnd):
    """The end that reads records.

    Args:
        data: the ring's bytes; their number is a power of two.
        published: the word with the writer's cursor, which this end only loads.
        consumed: the word with the reader's cursor, which this end stores.
    """

    __slots__ = (
        "_draining",
        "_is_behind",
        "_load_published",
        "_num_bytes",
        "_num_messages",
        "_store_consumed",
    )

    def __init__(self, data: memoryview, published: PlainWord, consumed: PlainWord) -> None:
        super().__init__(data.toreadonly(), published, consumed, consumed.load())
        self._load_published = published.load
        self._store_consumed = consumed.store
        self._num_messages = self._num_bytes = 0
        self._draining = False
        self._is_behind = False

    @classmethod
    def over(cls, buffer: memoryview, layout: RingLayout) -> RingReader:
        """The reader of a ring in a segment."""
        return cls(*parts_of(buffer, layout))

    def has_data(self) -> bool:
        """Whether the ring has an unread record."""
        # SYNC POINT: record published
        return self._load_published() != self._position

    def drain(self, handler: Handler, limit: int = 0) -> int:
        """Call `handler(kind, payload)` for the unread records, oldest first.

        The cursor moves once per call, past the last handled record. If the handler raises an
        error, the cursor moves past that record too, so the next call does not repeat the error.

        Args:
            handler: gets the payload as a read-only view that is valid until it returns, and
                must copy the bytes that it keeps. An array over the view stays usable after
                that, but then shows the bytes of later records.
            limit: the largest number of records to handle; 0 for all.

        Returns:
            The number of handled records.

        Raises:
            ProtocolMismatchError: the bytes at the cursor are no valid record. The cursor stays
                before them.
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
            # SYNC POINT: record consumed. After the last read of the bytes that this frees.
            self._store_consumed(self._position)
        return self._num_messages - num_before

    def receive(self, decode: Decode, release: Callable[[Any], None]) -> int:
        """Read the unread records, oldest first, each exactly once, also if exceptions of signal
        handlers end this call.

        Such an exception comes at a call, at the beginning of a function or at the end of a
        loop's turn, but not between two plain statements. So a record is either unread, and
        `decode` gets it again, or in its inbox. A record for which `decode` itself raises a
        ProtocolMismatchError is skipped.

        Args:
            decode: gets (kind, payload) as the handler of `drain` does, and changes nothing.
                Returns the message, the inbox's function that adds it, written in C, and what
                `release` has to get, or None.
            release: frees what a message was decoded from; its last action is the one that
                cannot be repeated.

        Returns:
            The number of bytes that were read.
        """
        # SYNC POINT: record published. Header and payload are read only after this load.
        published = self._load_published()
        begin = self._position
        if published == begin and not self._is_behind:
            return 0
        self._used_bytes(published, begin)
        self._is_behind = True
        try:
            while self._position != published:
                self._receive_one(decode, release, published)
        finally:
            # SYNC POINT: record consumed. After the last read of the bytes that this frees. If an
            # exception prevents this store, the next call repeats it.
            self._store_consumed(self._position)
        self._is_behind = False
        return self._position - begin

    def _receive_one(self, decode: Decode, release: Callable[[Any], None], published: int) -> None:
        length, kind, begin, end = self._header(published)
        if kind == PADDING_KIND:
            self._position = end
            return
        view = self._data[begin : begin + length]
        try:
            message, add, source = decode(kind, view)
        except ProtocolMismatchError:
            self._position = end
            raise
        finally:
            view.release()
        if source is not None:
            release(source)
        # No call may come between the end of `release` and that of `add`.
        self._num_messages += 1
        self._num_bytes += length
        self._position = end
        add(message)

    def _handle_one(self, handler: Handler, published: int) -> None:
        length, kind, begin, self._position = self._header(published)
        if kind == PADDING_KIND:
            return
        self._num_messages += 1
        self._num_bytes += length
        view = self._data[begin : begin + length]
        try:
            handler(kind, view)
        finally:
            view.release()

    def _header(self, published: int) -> tuple[int, int, int, int]:
        """(length, kind, index of the payload, position of the end) of the next record."""
        position = self._position
        index = position & self._mask
        length, kind, flags, sequence = _unpack_header(self._data, index)
        span = (length + ROUND_UP) & ALIGNED
        if (
            sequence != position
            or flags
            or span > published - position
            or span > self._capacity - index
        ):
            raise self._not_a_record(length, kind, sequence)
        return length, kind, index + RECORD_HEADER_BYTES, position + span

    def statistics(self) -> RingStatistics:
        """The counters since the creation of this object."""
        return RingStatistics(self._num_messages, self._num_bytes)

    def check_integrity(self) -> None:
        """Raise ProtocolMismatchError if another reader moved the cursor, or if an unread record
        is not valid. Tests call this."""
        consumed = self._consumed.load()
        if consumed != self._position and not self._draining:
            raise ProtocolMismatchError(
                f"the ring's reader is at position {self._position}, but its word is {consumed}: "
                "two readers on one ring?"
            )
        published = self._load_published()
        position = self._position
        self._used_bytes(published, position)
        while position < published:
            index = position & self._mask
            length, kind, _, sequence = _unpack_header(self._data, index)
            span = (length + ROUND_UP) & ALIGNED
            if sequence != position or span > min(published - position, self._capacity - index):
                raise self._not_a_record(length, kind, sequence)
            position += span

    def _not_a_record(self, length: int, kind: int, sequence: int) -> ProtocolMismatchError:
        return ProtocolMismatchError(
            f"no record at ring position {self._position}: length {length}, kind {kind}, "
            f"sequence {sequence}, capacity {self._capacity}; the peer speaks another version "
            "or memory is damaged"
        )
