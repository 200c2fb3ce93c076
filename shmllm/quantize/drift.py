"""How far the written weights are from the original ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from shmllm.errors import QuantizeError


@dataclass(slots=True)
class Drift:
    """Relative errors of tensors: the root mean square of the differences over that of the values.

    Attributes:
        worst: the largest error of one tensor.
        worst_name: its name in the checkpoint; "" before the first.
    """

    worst: float = 0.0
    worst_name: str = ""
    _error: float = 0.0
    _size: float = 0.0
    _names: set[str] = field(default_factory=set)

    def add(self, name: str, error: float, size: float) -> None:
        """Counts a tensor, or a part of one.

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
        self._names.add(name)
        self._error += error
        self._size += size
        relative = _relative(error, size)
        if relative >= self.worst:
            self.worst, self.worst_name = relative, name

    @property
    def num_tensors(self) -> int:
        """The number of measured tensors."""
        return len(self._names)

    @property
    def overall(self) -> float:
        """The error of all tensors together."""
        return _relative(self._error, self._size)


def _relative(error: float, size: float) -> float:
    return math.sqrt(error / size) if size else 0.0


def squares(values: Tensor) -> float:
    """The sum of the squares of float32 values, in float64."""
    return float(values.double().square_().sum())
