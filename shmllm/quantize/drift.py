"""How far the written weights are from the original ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shmllm.errors import QuantizeError


@dataclass(slots=True)
class Drift:
    """Relative errors of tensors: the root mean square of the differences over that of the values.

    Attributes:
        num_tensors: the number of measured tensors.
        worst: the largest error of one tensor.
        worst_name: its name in the checkpoint; "" before the first.
    """

    num_tensors: int = 0
    worst: float = 0.0
    worst_name: str = ""
    _error: float = 0.0
    _size: float = 0.0

    def add(self, name: str, error: float, size: float) -> None:
        """Counts a tensor.

        Args:
            name: its name in the checkpoint.
            error: the sum of the squares of the differences.
            size: the sum of the squares of the original values.

        Raises:
            QuantizeError: a value is infinite or not a number, before or after the rounding.
        """
        if not math.isfinite(error + size):
            raise QuantizeError(
                f"{name} has values that are not finite, or become infinite in this format"
            )
        self.num_tensors += 1
        self._error += error
        self._size += size
        relative = _relative(error, size)
        if relative >= self.worst:
            self.worst, self.worst_name = relative, name

    @property
    def overall(self) -> float:
        """The error of all tensors together."""
        return _relative(self._error, self._size)


def _relative(error: float, size: float) -> float:
    return math.sqrt(error / size) if size else 0.0


def squares(values: Tensor) -> float:
    """The sum of the squares of float32 values, in float64."""
    return float(values.double().square_().sum())
