"""How long something took, each time, in buckets that any process may read.

Owns the buckets' bounds and what can be said of their counts; must not know what was
measured. An octave has 8 buckets of equal width, from 1 us on, so that a quantile is
within an eighth of the truth at any scale, and counting costs the same for all.
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
    """The bucket that a duration falls into; the last one holds all that is longer."""
    octave = duration_ns.bit_length() - 1 - LOWEST_BITS
    if octave < 0:
        return 0
    sub = (duration_ns >> (octave + LOWEST_BITS - SUB_BITS)) & (SUB_BUCKETS - 1)
    return min((octave << SUB_BITS | sub) + 1, HISTOGRAM_BUCKETS - 1)


def lower_bound_ns(bucket: int) -> int:
    """The shortest duration of a bucket; the next one's is where it ends."""
    if bucket == 0:
        return 0
    octave, sub = divmod(bucket - 1, SUB_BUCKETS)
    return (SUB_BUCKETS + sub) << (octave + LOWEST_BITS - SUB_BITS)


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations that were counted until some moment, or between two.

    Attributes:
        counts: by bucket.
        total_ns: all of them added up.
    """

    counts: Sequence[int]
    total_ns: int

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_ns(self) -> float:
        """0 if there is none."""
        return self.total_ns / max(self.count, 1)

    def since(self, earlier: Durations) -> Durations:
        """Those that came after `earlier` was read."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Durations([now - then for now, then in pairs], self.total_ns - earlier.total_ns)

    def quantile_ns(self, share: float) -> float:
        """The duration that `share` of all are no longer than, within its bucket by
        proportion; 0 if there is none."""
        wanted = share * self.count
        below = 0
        for bucket, count in enumerate(self.counts):
            if count and below + count >= wanted:
                begin, end = lower_bound_ns(bucket), lower_bound_ns(bucket + 1)
                return begin + (end - begin) * max(wanted - below, 0) / count
            below += count
        return 0.0


def by_octave(durations: Durations, first_bits: int, last_bits: int) -> list[tuple[int, int]]:
    """(bound in ns, how many are shorter) for each power of two in [2**first_bits,
    2**last_bits]; exact, since octaves end where buckets end."""
    bounds = [1 << bits for bits in range(first_bits, last_bits + 1)]
    return [(bound, sum(durations.counts[: bucket_of(bound)])) for bound in bounds]


class HistogramWriter:
    """The end that counts. One process makes it, for the segment's whole life.

    Args:
        buffer: of the segment.
        offset: of the histogram's words.
    """

    __slots__ = ("_words",)

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self._words = Numbers(buffer, offset, HISTOGRAM_WORDS)

    def add(self, duration_ns: int, times: int = 1) -> None:
        """Count a duration, `times` times."""
        self._words.add(bucket_of(duration_ns), times)
        self._words.add(SUM_WORD, duration_ns * times)

    def close(self) -> None:
        """Let go of the segment; idempotent."""
        self._words.close()


def read_histogram(buffer: memoryview, offset: int) -> Durations:
    """What stands in a histogram. One that is being counted in is seen at some moment."""
    words = Numbers(buffer, offset, HISTOGRAM_WORDS)
    values = words.load_all()
    words.close()
    return Durations(values[:HISTOGRAM_BUCKETS], values[SUM_WORD])
