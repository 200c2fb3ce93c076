"""Reads the state of a ring without being one of its ends, for tools and after a crash."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shmllm.ipc.layout import (
    PADDING_KIND,
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    WORD_BYTES,
    RingLayout,
)
from shmllm.ipc.ring import parts_of, record_span
from shmllm.ipc.ring_statistics import RingStatistics, StatisticsLine


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record in a ring, unread, or read but not overwritten yet.

    Attributes:
        position: the position of the record in the ring.
        kind: the number of the record's kind.
        length: the bytes of its payload.
    """

    position: int
    kind: int
    length: int


@dataclass(frozen=True, slots=True)
class RingState:
    """The state of a ring.

    Attributes:
        published: the position of the writer.
        consumed: the position of the reader.
        records: the latest records without padding, oldest first. A record is unread if its
            position is `consumed` or larger.
        writer: the last counters that the writer published.
        reader: the last counters that the reader published.
    """

    published: int
    consumed: int
    records: tuple[RecordHeader, ...]
    writer: RingStatistics
    reader: RingStatistics

    @property
    def used_bytes(self) -> int:
        return self.published - self.consumed


def peek(buffer: memoryview, layout: RingLayout, num_records: int) -> RingState:
    """Read the state of a ring. If its ends use the ring at the same time, the parts of the
    result may belong to slightly different times.

    Args:
        buffer: the bytes of the segment.
        layout: the layout of the ring in the segment.
        num_records: the largest number of records to return.
    """
    data, published_word, consumed_word = parts_of(buffer, layout)
    with data:
        consumed, published = consumed_word.load(), published_word.load()
        published_word.close()
        consumed_word.close()
        records = _latest(data, published, num_records) if num_records > 0 else []
    return RingState(
        published,
        consumed,
        tuple(records),
        _statistics(buffer, layout.writer_stats_offset),
        _statistics(buffer, layout.reader_stats_offset),
    )


def _latest(data: memoryview, published: int, num_records: int) -> list[RecordHeader]:
    """The headers of the last `num_records` records, found backwards from `published`.

    A valid header contains its own position, so this function takes each aligned place of the
    ring with its own position in it as a candidate. It returns the chain of candidates in which
    each record ends where the next one begins and the last one ends at `published`.
    """
    if published % RECORD_ALIGNMENT or published >= 2**63:
        return []
    capacity = len(data)
    places = np.frombuffer(data, dtype="<u8").reshape(-1, RECORD_ALIGNMENT // WORD_BYTES)[:, 1]
    first = max(published - capacity, 0)
    positions = np.arange(first, published, RECORD_ALIGNMENT, dtype=np.uint64)
    indexes = (positions & np.uint64(capacity - 1)) // np.uint64(RECORD_ALIGNMENT)
    by_end: dict[int, RecordHeader] = {}
    for position in positions[places[indexes.astype(np.intp)] == positions].tolist():
        length, kind, _, _ = RECORD_HEADER.unpack_from(data, position & (capacity - 1))
        by_end[position + record_span(length)] = RecordHeader(position, kind, length)
    del places  # the array would keep the segment mapped
    records: list[RecordHeader] = []
    end = published
    while (record := by_end.get(end)) is not None and len(records) < num_records:
        end = record.position
        if record.kind != PADDING_KIND:
            records.append(record)
    return records[::-1]


def _statistics(buffer: memoryview, offset: int) -> RingStatistics:
    line = StatisticsLine(buffer, offset)
    statistics = line.load()
    line.close()
    return statistics
