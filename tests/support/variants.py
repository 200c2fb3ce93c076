"""Marks the variants of a test that repeat a property, so that only `pytest -m slow` runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return the parameters of one variant, for `parametrize`, outside of the default suite."""
    return pytest.param(*values, marks=pytest.mark.slow)


def diagonal(*parameters: Sequence[Any]) -> list[Any]:
    """Return all combinations of values of these parameters. The default suite has each combination
    of all parameters but the last one, which takes its values in turn."""
    last = len(parameters[-1])
    places = itertools.product(*(range(len(values)) for values in parameters))
    combinations = itertools.product(*parameters)
    return [
        values if sum(others) % last == place else slow(*values)
        for (*others, place), values in zip(places, combinations, strict=True)
    ]


def each_once(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Return all combinations of values of these parameters. The default suite has each value of
    the first one once, and each value of the others.

    Raises:
        ValueError: the first parameter has too few values for this order of the others.
    """
    combinations = list(itertools.product(*others))
    size = len(combinations)
    step = next(step for step in range(size * 5 // 8, 2 * size) if math.gcd(step, size) == 1)
    places = [place * step % size for place in range(len(first))]
    for index, values in enumerate(others):
        if not all(any(combinations[place][index] is each for place in places) for each in values):
            raise ValueError(f"the default suite would not have each value of {values}")
    return [
        (value, *rest) if number == place else slow(value, *rest)
        for value, place in zip(first, places, strict=True)
        for number, rest in enumerate(combinations)
    ]
