"""A destination of a whole table of which a model keeps what some rows make."""

from __future__ import annotations

import torch
from torch import Tensor


class RowsOfTable:
    """A matrix made of some rows of what a checkpoint has in one tensor, [vocab, hidden].

    Attributes:
        own: the matrix; with one row for two tokens, the second's row minus the first's.
    """

    def __init__(self, own: Tensor, tokens: tuple[int, ...], vocab_size: int) -> None:
        self.own = own
        self.dtype = own.dtype
        self.device = own.device
        self._tokens = list(tokens)
        self._vocab_size = vocab_size

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._vocab_size, self.own.shape[1]))

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, values: Tensor, /) -> RowsOfTable:
        """Writes what the rows of ``values``, a whole tensor, make."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        rows = values[self._tokens].float()
        self.own.copy_(rows[1:] - rows[:1] if len(self.own) < len(rows) else rows)
        return self

    def clone(self) -> Tensor:
        """Returns a whole tensor with the matrix in the last of the rows, and zeros elsewhere."""
        values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        values[self._tokens[-len(self.own) :]] = self.own
        return values
