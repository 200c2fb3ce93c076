"""Marks the variants of a test that repeat a property, so that only `pytest -m slow` runs them."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return the parameters of one variant, for `parametrize`, outside of the default suite."""
    return pytest.param(*values, marks=pytest.mark.slow)
