"""Rows of numbers that pooling requests return, and their norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.floating[Any]]

SMALLEST_NORM = 1e-12
"""The smallest norm that a row is divided by, as in torch's normalize."""


def normalized(rows: Rows) -> Rows:
    """Rows [..., width] divided by their Euclidean norms, in float64. A row's result depends on
    nothing but that row."""
    rows = rows.astype(np.float64)
    norms = np.sqrt(np.add.reduce(rows * rows, axis=-1, keepdims=True))
    quotients: Rows = rows / np.maximum(norms, SMALLEST_NORM)
    return quotients
