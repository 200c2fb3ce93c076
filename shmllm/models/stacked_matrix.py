"""What a checkpoint has as the rows of one matrix, and a model as several matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StackedMatrix:
    """A destination [matrices, rows, columns] as what a checkpoint has as [matrices * rows,
    columns].

    Attributes:
        own: the destination, one of `matrices.Destination`.
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self.dtype: torch.dtype = own.dtype
        self.device: torch.device = own.device

    @property
    def shape(self) -> torch.Size:
        count, rows, columns = self.own.shape
        return torch.Size([count * rows, columns])

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, values: Tensor, /) -> StackedMatrix:
        """Writes ``values`` [matrices * rows, columns]."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        self.own.copy_(values.reshape(self.own.shape))
        return self

    def clone(self) -> Tensor:
        """Returns the values as a new tensor."""
        values: Tensor = self.own.clone()
        return values.reshape(self.shape)
