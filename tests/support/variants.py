"""Marks the variants of a test that repeat a property, so that only `pytest -m slow` runs them."""

from __future__ import annotations

import itertools
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
