"""Fits the duration of a step to measured steps. This module must not know their origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulated_pool.engine import StepCost

Row = tuple[int, int, float, float]
"""(tokens, requests, context, seconds) of a step; see StepCost."""


@dataclass(frozen=True)
class Fit:
    """A fitted cost, and how well it fits.

    Attributes:
        cost: the cost.
        median_error: the median of the steps' relative errors.
        num_steps: the number of steps.
    """

    cost: StepCost
    median_error: float
    num_steps: int


def fit(steps: Sequence[Row]) -> Fit:
    """Fits a cost to steps, by least squares of relative errors. Steps that another program made
    much slower are left out of a second fit."""
    rows = np.array(steps, dtype=np.float64)
    features = np.column_stack([np.ones(len(rows)), rows[:, :3]])
    seconds = rows[:, 3]
    weights = _solve(features, seconds)
    is_usual = seconds < 1.5 * (features @ weights)
    weights = _solve(features[is_usual], seconds[is_usual])
    errors = np.abs(features @ weights / seconds - 1)
    return Fit(StepCost(*map(float, weights)), float(np.median(errors)), len(rows))


def _solve(
    features: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The weights, none of them negative, with the least squares of relative errors."""
    used = list(range(features.shape[1]))
    while True:
        scaled = features[:, used] / seconds[:, None]
        found = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            weights = np.zeros(features.shape[1])
            weights[used] = found
            return weights
        del used[int(np.argmin(found))]
