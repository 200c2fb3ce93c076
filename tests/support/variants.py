"""Marks the variants of a test that repeat a property, so that only `pytest -m slow` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return the parameters of one variant, for `parametrize`, outside of the default suite."""
    return pytest.param(*values, marks=pytest.mark.slow)


def diagonal(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[Any]:
    """Return all combinations of three parameters. The default suite has one combination for each
    pair of values of the first two; the third takes its values in turn."""
    places = itertools.product(*(range(len(values)) for values in (first, second, third)))
    combinations = itertools.product(first, second, third)
    return [
        values if (i + j) % len(third) == k else slow(*values)
        for (i, j, k), values in zip(places, combinations, strict=True)
    ]
