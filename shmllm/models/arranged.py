"""Destinations whose numbers a checkpoint's tensor has in another order, fewer times, or times a
factor.

This module must not know what the numbers are, nor which destinations there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor


class Arranged(ABC):
    """A destination that another one stands for.

    Attributes:
        own: the other one.
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self.dtype: torch.dtype = own.dtype
        self.device: torch.device = own.device

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the checkpoint's tensor."""

    @abstractmethod
    def of(self, own: Any) -> Self:
        """Returns the same arrangement of another destination of the same shape."""

    @abstractmethod
    def _arranged(self, values: Tensor) -> Tensor:
        """Returns the numbers of `own` that a checkpoint's tensor has."""

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, values: Tensor, /) -> Self:
        """Writes ``values``, a whole tensor."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        self.own.copy_(self._arranged(values))
        return self

    @abstractmethod
    def clone(self) -> Tensor:
        """Returns the values as a new tensor."""


class StackedMatrix(Arranged):
    """A destination [matrices, rows, columns] as what a checkpoint has as [matrices * rows,
    columns]."""

    @property
    def shape(self) -> torch.Size:
        count, rows, columns = self.own.shape
        return torch.Size([count * rows, columns])

    def of(self, own: Any) -> StackedMatrix:
        return StackedMatrix(own)

    def _arranged(self, values: Tensor) -> Tensor:
        return values.reshape(self.own.shape)

    def clone(self) -> Tensor:
        values: Tensor = self.own.clone()
        return values.reshape(self.shape)


class PairedRows(Arranged):
    """A destination [rows, ...] of heads whose rotated pairs are neighbours, as what transformers
    has with the first elements of all pairs of a head before the second ones.

    Args:
        own: the destination.
        num_heads: the number of heads that its rows are those of.
    """

    def __init__(self, own: Any, num_heads: int) -> None:
        super().__init__(own)
        self._num_heads = num_heads

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.own.shape)

    def of(self, own: Any) -> PairedRows:
        return PairedRows(own, self._num_heads)

    def _arranged(self, values: Tensor) -> Tensor:
        halves: Tensor = values.unflatten(0, (self._num_heads, 2, -1))
        return halves.transpose(1, 2).flatten(0, 2)

    def clone(self) -> Tensor:
        pairs: Tensor = self.own.clone().unflatten(0, (self._num_heads, -1, 2))
        return pairs.transpose(1, 2).flatten(0, 2)


class UnstackedMatrix(Arranged):
    """A destination [matrices * rows, columns] as what a checkpoint has as [matrices, rows,
    columns].

    Args:
        own: the destination.
        count: the number of matrices.
    """

    def __init__(self, own: Any, count: int) -> None:
        super().__init__(own)
        self._count = count

    @property
    def shape(self) -> torch.Size:
        rows, columns = self.own.shape
        return torch.Size([self._count, rows // self._count, columns])

    def of(self, own: Any) -> UnstackedMatrix:
        return UnstackedMatrix(own, self._count)

    def _arranged(self, values: Tensor) -> Tensor:
        return values.reshape(self.own.shape)

    def clone(self) -> Tensor:
        values: Tensor = self.own.clone()
        return values.reshape(self.shape)


class OrderedRows(Arranged):
    """A destination [rows, columns] with the rows of a checkpoint's tensor in another order.

    Args:
        own: the destination.
        order: [rows] int64, the row of the tensor that each row is.
    """

    def __init__(self, own: Any, order: Tensor) -> None:
        super().__init__(own)
        self._order = order

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.own.shape)

    def of(self, own: Any) -> OrderedRows:
        return OrderedRows(own, self._order)

    def _arranged(self, values: Tensor) -> Tensor:
        return values[self._order.to(values.device)]

    def clone(self) -> Tensor:
        own: Tensor = self.own.clone()
        values = torch.empty_like(own)
        values[self._order.to(own.device)] = own
        return values


class AlternatedHalves(Arranged):
    """A destination [..., columns] whose columns a checkpoint's tensor has in another order: its
    first half, then its second half, where those of the destination take turns."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.own.shape)

    def of(self, own: Any) -> AlternatedHalves:
        return AlternatedHalves(own)

    def _arranged(self, values: Tensor) -> Tensor:
        halves: Tensor = values.unflatten(-1, (2, -1))
        return halves.transpose(-1, -2).flatten(-2)

    def clone(self) -> Tensor:
        pairs: Tensor = self.own.clone().unflatten(-1, (-1, 2))
        return pairs.transpose(-1, -2).flatten(-2)


class BeforeZeros(Arranged):
    """A destination of rows or numbers of which a checkpoint has the first half; the second half
    becomes 0."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.own.shape[0] // 2, *self.own.shape[1:]))

    def of(self, own: Any) -> BeforeZeros:
        return BeforeZeros(own)

    def _arranged(self, values: Tensor) -> Tensor:
        return torch.cat((values, torch.zeros_like(values)))

    def clone(self) -> Tensor:
        both: Tensor = self.own.clone()
        return both[: len(both) // 2].clone()


class ChangedRows(Arranged):
    """A destination [rows, columns] whose rows are computed of those of a checkpoint, each of its
    own. What it has is not what was written."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.own.shape)

    def clone(self) -> Tensor:
        values: Tensor = self.own.clone()
        return values


class UnitRows(ChangedRows):
    """A destination whose rows have the length 1, whatever that of a checkpoint's is."""

    def of(self, own: Any) -> UnitRows:
        return UnitRows(own)

    def _arranged(self, values: Tensor) -> Tensor:
        return torch.nn.functional.normalize(values.float())


class NormedRows(ChangedRows):
    """A destination whose rows are those of a checkpoint behind an RMSNorm without weights, which
    reads them in the destination's dtype and computes in float32.

    Args:
        own: the destination.
        eps: added to the mean square.
    """

    def __init__(self, own: Any, eps: float) -> None:
        super().__init__(own)
        self._eps = eps

    def of(self, own: Any) -> NormedRows:
        return NormedRows(own, self._eps)

    def _arranged(self, values: Tensor) -> Tensor:
        rows = values.to(self.dtype).float()
        return rows * torch.pow(rows.square().mean(-1, keepdim=True) + self._eps, -0.5)


class SpreadColumns(Arranged):
    """A destination [rows, width] as what a checkpoint has as [columns, rows]: each of its columns
    is one of those.

    Args:
        own: the destination.
        columns: [width] int64, the column that each is.
        count: the number of columns.
    """

    def __init__(self, own: Any, columns: Tensor, count: int) -> None:
        super().__init__(own)
        self._columns, self._count = columns, count

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self._count, self.own.shape[0]])

    def of(self, own: Any) -> SpreadColumns:
        return SpreadColumns(own, self._columns, self._count)

    def _arranged(self, values: Tensor) -> Tensor:
        return values.t()[:, self._columns.to(values.device)]

    def clone(self) -> Tensor:
        """Returns the values as a new tensor, with zeros in columns that none is."""
        own: Tensor = self.own.clone()
        values = own.new_zeros(self.shape)
        values[self._columns.to(own.device)] = own.t()
        return values
