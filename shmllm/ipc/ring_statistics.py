"""The counters of a ring's two ends, and the lines of shared memory that publish them.

An end counts in Python ints and copies them to its line only before it parks and when it closes;
an engine also does that ten times a second.
"""

from __future__ import annotations

from typing import NamedTuple

from shmllm.ipc.words import Numbers


class RingStatistics(NamedTuple):
    """The counters of one end of a ring since its creation.

    Attributes:
        num_messages: the number of records that this end wrote or read.
        num_bytes: the bytes of their payloads.
        times_full: the number of writes that found no room; 0 for a reader.
        high_water_bytes: the most bytes in use that the writer saw; 0 for a reader.
        times_parked: the number of times that a front end parked. An engine parks for all its
            front ends at once and counts that in Stat.TIMES_PARKED.
    """

    num_messages: int
    num_bytes: int
    times_full: int = 0
    high_water_bytes: int = 0
    times_parked: int = 0


class StatisticsLine:
    """The line of a client segment with the counters of one end; only one process writes it.

    Args:
        buffer: the bytes of the segment.
        offset: the byte offset of the line.
    """

    __slots__ = ("_words",)

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self._words = Numbers(buffer, offset, len(RingStatistics._fields))

    def store(self, statistics: RingStatistics) -> None:
        self._words.store_all(statistics)

    def load(self) -> RingStatistics:
        return RingStatistics(*self._words.load_all())

    def close(self) -> None:
        """Release the view of the segment; idempotent."""
        self._words.close()
