"""Axes of pictures: maps values to pixels and chooses round tick values.

This module must not know how anything is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

MAX_TICKS = 6
MAX_ENCLOSING_TICKS = 8


class LinearAxis:
    """Maps values to pixels linearly.

    Args:
        low: the value at pixel `begin`.
        high: the value at pixel `end`; above `low`.
        begin: the pixel of `low`.
        end: the pixel of `high`.
        step: the distance of the ticks; by default a round value with at most MAX_TICKS steps.
    """

    def __init__(
        self, low: float, high: float, begin: float, end: float, *, step: float | None = None
    ) -> None:
        self._low, self._high = low, high
        self._step = _round_step((high - low) / MAX_TICKS) if step is None else step
        self._begin = begin
        self._scale = (end - begin) / (high - low)

    @classmethod
    def enclosing(cls, values: Sequence[float], begin: float, end: float) -> LinearAxis:
        """An axis between the round values that enclose `values`."""
        low, high = min(values), max(values)
        if high - low < 1e-9 * max(abs(high), 1.0):
            low, high = low - 0.5, high + 0.5
        step = _round_step((high - low) / MAX_ENCLOSING_TICKS)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, begin, end, step=step)

    def place(self, value: float) -> float:
        """The pixel of `value`."""
        return self._begin + (value - self._low) * self._scale

    def ticks(self) -> list[float]:
        """The round values between the ends of the axis."""
        first = math.ceil(self._low / self._step - 1e-9)
        last = math.floor(self._high / self._step + 1e-9)
        return [number * self._step for number in range(first, last + 1)]

    def label(self, value: float) -> str:
        """The text of a tick, with as many digits as the step needs."""
        return f"{value:.{max(0, -math.floor(math.log10(self._step) + 1e-9))}f}"


class LogAxis:
    """Maps values to pixels by their logarithm.

    Args:
        lowest: the smallest value; above 0.
        highest: the largest value; not below `lowest`.
        begin: the pixel of `lowest`.
        end: the pixel of `highest`.
        whole_decades: whether to widen the range to powers of ten.
    """

    def __init__(
        self,
        lowest: float,
        highest: float,
        begin: float,
        end: float,
        *,
        whole_decades: bool = False,
    ) -> None:
        if whole_decades:
            lowest = 10.0 ** math.floor(math.log10(lowest))
            highest = max(10.0 ** math.ceil(math.log10(highest)), 10 * lowest)
        elif highest < 1.3 * lowest:
            lowest, highest = lowest / 1.15, lowest * 1.3
        self.lowest, self.highest = lowest, highest
        self._begin = begin
        self._scale = (end - begin) / math.log(highest / lowest)

    def place(self, value: float) -> float:
        """The pixel of `value`."""
        return self._begin + math.log(value / self.lowest) * self._scale

    def ticks(self) -> Iterator[tuple[float, bool]]:
        """Yields (round value, whether it gets a label) for each tick in the range."""
        decades = math.log10(self.highest / self.lowest)
        labelled = (1,) if decades >= 3 else (1, 2, 5) if decades >= 0.7 else tuple(range(1, 10))
        first, last = (math.floor(math.log10(v)) for v in (self.lowest, self.highest))
        for power in range(first, last + 1):
            for factor in range(1, 10):
                value = factor * 10.0**power
                if self.lowest * 0.999 <= value <= self.highest * 1.001:
                    yield value, factor in labelled


def _round_step(at_least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `at_least`."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= at_least * (1 - 1e-9))
