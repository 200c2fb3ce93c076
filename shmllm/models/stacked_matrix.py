"""What a checkpoint has as the rows of one matrix, and a model as several matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shmllm.models.matrices import Destination


class StackedMatrix:
    """A destination [matrices, rows, columns] as what a checkpoint has as [matrices * rows,
    columns].

    Attributes:
        own: the destination.
    """

    def __init__(self, own: Destination) -> None:
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
        return self.own.clone().reshape(self.shape)
