"""A ring looked at from outside: for tools, and after a death."""

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
    """Header of a record that lies in a ring, or lay there and was not overwritten yet."""

    position: int
    kind: int
    length: int


@dataclass(frozen=True, slots=True)
class RingState:
    """What stands in a ring.

    Attributes:
        records: the latest, oldest first, padding left out. Those at positions from
            `consumed` on are unread.
        writer: what its writing end has counted.
        reader: what its reading end has counted.
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
    """Look at a ring without being one of its ends. Of a ring in use it sees some moment.

    Args:
        buffer: of the segment.
        layout: which ring.
        num_records: how many records to look for, back from the latest.
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
    """Records of the last lap, found backwards from `published`.

    A header names its own position, so every place of the lap is looked at for one. Of
    those only the chain counts in which each record ends where the next begins.
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
    del places  # it holds the segment's memory
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
