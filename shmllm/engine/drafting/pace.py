"""How many drafted tokens a step should compute, from measured times and measured acceptance.

A step with a few more tokens takes hardly longer while it is bound by reading the weights, and in
proportion to its tokens when it is bound by computing. So a draft pays if the probability that it
is accepted exceeds what one more token costs, as a part of what a token costs without drafts. This
module estimates both while the engine runs. It must not know who drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

TIMES_KEPT = 5
"""The median of this many last times of steps with the same number of tokens counts."""
FIRST_PROBE, LAST_PROBE = 16, 512
"""After so many steps without drafts, which double as long as probes fail, one has them again."""
PROBED = 2
"""The most drafts of such a step, all for the request with the best chances; and the number of such
steps in a row, of which the first may have to catch up with the others."""
LONGEST_DRAFTING = 64
"""After so many steps with drafts, one has none: that is what they are compared with."""


class Offer(NamedTuple):
    """What was drafted for a request.

    chance: the probability that a draft is accepted if those before it were.
    size: the number of drafts.
    """

    chance: float
    size: int


class StepTimes:
    """The times of steps by their number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[int]] = {}
        self._medians: dict[int, float] = {}

    def add(self, num_tokens: int, time_ns: int) -> None:
        """Take note of a step."""
        times = self._times.setdefault(num_tokens, deque(maxlen=TIMES_KEPT))
        times.append(time_ns)
        self._medians[num_tokens] = median(times)

    def nearest(self, num_tokens: int) -> float | None:
        """The time of steps whose number of tokens is nearest, in ns; None: none was measured."""
        if not self._medians:
            return None
        return self._medians[min(self._medians, key=lambda size: abs(size - num_tokens))]

    def above(self, num_tokens: int) -> list[tuple[int, float]]:
        """The numbers of tokens above this one, ascending, and the times of such steps."""
        return sorted(each for each in self._medians.items() if each[0] > num_tokens)


class Pace:
    """Chooses how many of the offered drafts a step computes.

    Args:
        first_probe: after so many steps without drafts there are some again.

    Attributes:
        break_even: the probability that the next draft must exceed to pay, when drafts were last
            offered; 1 and more mean that no draft pays.
    """

    def __init__(self, first_probe: int = FIRST_PROBE) -> None:
        self._plain, self._drafted = StepTimes(), StepTimes()
        self._num_idle = self._num_drafting = self._num_probing = 0
        self._first_probe = self._next_probe = first_probe
        self.break_even = 0.0

    def measured(self, num_tokens: int, has_drafts: bool, time_ns: int) -> None:
        """Take note of a step that only decoded."""
        (self._drafted if has_drafts else self._plain).add(num_tokens, time_ns)

    def choose(self, offers: Sequence[Offer], num_requests: int) -> list[int]:
        """How many of its drafts each request gets computed.

        Args:
            offers: what was drafted for each request.
            num_requests: how many requests decode in the step, also those without drafts.
        """
        plain = self._plain.nearest(num_requests)
        if plain is None or self._num_drafting >= LONGEST_DRAFTING:
            self._num_drafting = 0
            return [0] * len(offers)
        by_offer = [offer.chance ** np.arange(1, offer.size + 1) for offer in offers]
        chances = np.sort(np.concatenate(by_offer))[::-1]
        times = self._estimate(num_requests, plain, len(chances))
        chances = chances[: len(times)]
        rates = (num_requests + np.cumsum(chances)) / times
        self.break_even = float((times[0] - plain) * num_requests / plain)
        best = int(rates.argmax())
        if rates[best] <= num_requests / plain:
            return self._rest(offers)
        self._num_idle, self._next_probe = 0, self._first_probe
        self._num_drafting += 1
        return [int((own >= chances[best]).sum()) for own in by_offer]

    def _estimate(self, num_requests: int, plain: float, most: int) -> np.ndarray:
        """The times of steps with 1 to `most` drafts, in ns; of fewer, if the time of more cannot
        be told from the steps that were measured."""
        known = [(num_requests, plain), *self._drafted.above(num_requests)]
        sizes, times = (np.array(column, np.float64) for column in zip(*known, strict=True))
        times = np.maximum.accumulate(times)
        largest = int(sizes[-1])
        wanted = np.arange(1, most + 1) + num_requests
        wanted = wanted[: max(largest + 1, largest * 3 // 2) - num_requests]
        found = np.interp(wanted, sizes, times)
        if len(known) > 1:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            found += slope * np.maximum(wanted - largest, 0)
        return found

    def _rest(self, offers: Sequence[Offer]) -> list[int]:
        """No drafts, but some now and then: times and acceptance may have changed."""
        self._num_idle += 1
        if self._num_idle >= self._next_probe:
            self._num_idle, self._num_probing = 0, PROBED
            self._next_probe = min(2 * self._next_probe, LAST_PROBE)
        if not self._num_probing:
            return [0] * len(offers)
        self._num_probing -= 1
        best = max(range(len(offers)), key=lambda index: offers[index].chance)
        return [min(offer.size, PROBED) * (at == best) for at, offer in enumerate(offers)]
