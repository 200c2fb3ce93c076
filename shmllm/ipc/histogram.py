"""Histograms of durations in shared memory, which one process writes and any process reads.

This module owns the bounds of the buckets and the statistics computed from their counts. It must
not know which durations are measured. From 1.024 us up, each octave (factor of 2) has 8 buckets of
equal width, so a quantile is exact to within an eighth at any scale, and the cost of counting
does not depend on the duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmllm.ipc.layout import HISTOGRAM_BUCKETS, HISTOGRAM_WORDS
from shmllm.ipc.words import Numbers

SUB_BITS = 3
SUB_BUCKETS = 1 << SUB_BITS
LOWEST_BITS = 10
SUM_WORD = HISTOGRAM_WORDS - 1


def bucket_of(duration_ns: int) -> int:
    """Index of a duration's bucket; the last bucket also counts all longer durations."""
    octave = duration_ns.bit_length() - 1 - LOWEST_BITS
    if octave < 0:
        return 0
    sub = (duration_ns >> (octave + LOWEST_BITS - SUB_BITS)) & (SUB_BUCKETS - 1)
    return min((octave << SUB_BITS | sub) + 1, HISTOGRAM_BUCKETS - 1)


def lower_bound_ns(bucket: int) -> int:
    """The shortest duration in a bucket; the bucket ends below the next bucket's bound."""
    if bucket == 0:
        return 0
    octave, sub = divmod(bucket - 1, SUB_BUCKETS)
    return (SUB_BUCKETS + sub) << (octave + LOWEST_BITS - SUB_BITS)


@dataclass(frozen=True, slots=True)
class Durations:
    """The counts of a histogram at one time, or the difference of two readings.

    Attributes:
        counts: the number of durations in each bucket.
        total_ns: the sum of all durations.
    """

    counts: Sequence[int]
    total_ns: int

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_ns(self) -> float:
        """The mean duration; 0 if there is none."""
        return self.total_ns / max(self.count, 1)

    def since(self, earlier: Durations) -> Durations:
        """The durations that were counted after `earlier` was read."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Durations([now - then for now, then in pairs], self.total_ns - earlier.total_ns)

    def quantile_ns(self, share: float) -> float:
        """The `share` quantile (0 to 1), interpolated linearly inside its bucket; 0 if there is
        no duration."""
        wanted = share * self.count
        below = 0
        for bucket, count in enumerate(self.counts):
            if count and below + count >= wanted:
                begin, end = lower_bound_ns(bucket), lower_bound_ns(bucket + 1)
                return begin + (end - begin) * max(wanted - below, 0) / count
            below += count
        return 0.0


def by_octave(durations: Durations, first_bits: int, last_bits: int) -> list[tuple[int, int]]:
    """(bound in ns, number of shorter durations) for each power of two from 2**first_bits to
    2**last_bits. The numbers are exact, because each octave begins with a new bucket."""
    bounds = [1 << bits for bits in range(first_bits, last_bits + 1)]
    return [(bound, sum(durations.counts[: bucket_of(bound)])) for bound in bounds]


class HistogramWriter:
    """Counts durations. In the whole life of a segment only one process may create it.

    Args:
        buffer: the bytes of the segment.
        offset: byte offset of the histogram's words.
    """

    __slots__ = ("_words",)

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self._words = Numbers(buffer, offset, HISTOGRAM_WORDS)

    def add(self, duration_ns: int, times: int = 1) -> None:
        """Count one duration, `times` times."""
        self._words.add(bucket_of(duration_ns), times)
        self._words.add(SUM_WORD, duration_ns * times)

    def close(self) -> None:
        """Release the view of the segment; idempotent."""
        self._words.close()


def read_histogram(buffer: memoryview, offset: int) -> Durations:
    """Read a histogram. If its process counts a duration at the same time, the result may
    contain that duration only in part: each word is read whole, but not all words at once."""
    words = Numbers(buffer, offset, HISTOGRAM_WORDS)
    values = words.load_all()
    words.close()
    return Durations(values[:HISTOGRAM_BUCKETS], values[SUM_WORD])
