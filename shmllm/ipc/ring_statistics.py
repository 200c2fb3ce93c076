"""What the ends of a ring have counted, and the line of shared memory where they show it.

Counting is done in Python ints on the hot path; an end copies them to its line now and
then: before it sleeps, when it closes, and an engine ten times a second.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from shmllm.ipc.words import WordTable


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Counts since one end was made.

    Attributes:
        num_messages: written, or read.
        num_bytes: of their payloads.
        times_full: writes that found no room; of a writer only.
        high_water_bytes: most bytes in use that the writer saw; of a writer only.
        times_parked: how often this end slept for want of records or of room. An engine
            sleeps for all its front ends at once and counts that in Stat.TIMES_PARKED.
    """

    num_messages: int
    num_bytes: int
    times_full: int = 0
    high_water_bytes: int = 0
    times_parked: int = 0


NUM_WORDS = 5


class StatisticsLine:
    """One end's counters where others can read them.

    Args:
        buffer: of the client segment.
        offset: of the line; one process writes it for its whole life.
    """

    __slots__ = ("_words",)

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self._words = WordTable(buffer, offset, NUM_WORDS)

    def store(self, statistics: RingStatistics) -> None:
        for index, value in enumerate(astuple(statistics)):
            self._words.store(index, value)

    def load(self) -> RingStatistics:
        return RingStatistics(*self._words.load_all())

    def close(self) -> None:
        """Let go of the segment; idempotent."""
        self._words.close()
