"""How many drafted tokens a step should compute, from measured times and measured acceptance.

A step with a few more tokens takes hardly longer while it is bound by reading the weights, and in
proportion to its tokens when it is bound by computing. So a draft pays if the probability that it
is accepted exceeds what one more token costs, as a part of what a token costs without drafts. This
module estimates both while the engine runs. It must not know who drafts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median

TIMES_KEPT = 7
"""The median of this many last times of steps with the same number of tokens counts."""
FIRST_PROBE, LAST_PROBE = 16, 512
"""After so many steps without drafts, which double as long as probes fail, one has them again."""


class StepTimes:
    """The times of steps by their number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[int]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []

    def add(self, num_tokens: int, time_ns: int) -> None:
        """Take note of a step."""
        times = self._times.get(num_tokens)
        if times is None:
            times = self._times[num_tokens] = deque(maxlen=TIMES_KEPT)
            insort(self._sizes, num_tokens)
        times.append(time_ns)
        self._medians[num_tokens] = median(times)

    def estimate(self, num_tokens: int) -> float | None:
        """The time of a step with so many tokens, in ns: between the times of fewer and of more
        tokens, or that of the nearest number; None if no step was measured."""
        sizes = self._sizes
        if not sizes:
            return None
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes) or sizes[at] == num_tokens or not at:
            return self._medians[sizes[min(at, len(sizes) - 1)]]
        below, above = sizes[at - 1], sizes[at]
        low, high = self._medians[below], self._medians[above]
        return low + (high - low) * (num_tokens - below) / (above - below)


class Pace:
    """Chooses how many of the offered drafts a step computes."""

    def __init__(self) -> None:
        self._plain, self._drafted = StepTimes(), StepTimes()
        self._num_idle = 0
        self._next_probe = FIRST_PROBE

    def measured(self, num_tokens: int, has_drafts: bool, time_ns: int) -> None:
        """Take note of a step that only decoded."""
        (self._drafted if has_drafts else self._plain).add(num_tokens, time_ns)

    def choose(self, offered: Sequence[tuple[float, int]], num_requests: int) -> list[int]:
        """How many of its drafts each request gets computed.

        Args:
            offered: for each request, the probability that a draft is accepted if those before it
                were, and the number of its drafts.
            num_requests: how many requests decode in the step, also those without drafts.
        """
        chances = sorted(
            (
                (chance**place, place, index)
                for index, (chance, count) in enumerate(offered)
                for place in range(1, count + 1)
            ),
            reverse=True,
        )
        plain = self._plain.estimate(num_requests)
        if plain is None:
            return self._none(offered)
        best, best_rate, expected = 0, num_requests / plain, float(num_requests)
        for count, (chance, _, _) in enumerate(chances, 1):
            expected += chance
            size = num_requests + count
            time_ns = self._drafted.estimate(size) or self._plain.estimate(size) or plain
            if expected / max(time_ns, plain) > best_rate:
                best, best_rate = count, expected / max(time_ns, plain)
        return self._take(offered, chances[:best]) if best else self._none(offered)

    def _take(
        self, offered: Sequence[tuple[float, int]], taken: Sequence[tuple[float, int, int]]
    ) -> list[int]:
        self._num_idle, self._next_probe = 0, FIRST_PROBE
        counts = [0] * len(offered)
        for _, place, index in taken:
            counts[index] = max(counts[index], place)
        return counts

    def _none(self, offered: Sequence[tuple[float, int]]) -> list[int]:
        """No drafts, but all of them now and then: times and acceptance may have changed."""
        self._num_idle += 1
        if self._num_idle < self._next_probe:
            return [0] * len(offered)
        self._num_idle = 0
        self._next_probe = min(2 * self._next_probe, LAST_PROBE)
        return [count for _, count in offered]
