"""How activations are multiplied with a weight matrix.

Owns the ways of doing it, and what each of them derives from the weights. Must not know which
layer a matrix belongs to, or when weights change: whoever changes them calls ``derive``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Product(Protocol):
    """``x @ weight`` for one matrix of the model.

    What it derives from the weight (a packed copy, say) lies outside the arenas, can be dropped
    while the engine sleeps, and is made again when the weight has changed.
    """

    @property
    def derived_bytes(self) -> int:
        """Memory that is held besides the weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] in x's dtype."""

    def derive(self) -> None:
        """Make anew what is derived from the weight as it is now."""

    def drop(self) -> None:
        """Give back the memory of what is derived; no call before the next ``derive``."""


MakeProduct = Callable[[Tensor], Product]
"""The product of a weight stored as [in, out], contiguous or the transpose of such."""


class PlainProduct:
    """torch's own product; derives nothing."""

    derived_bytes = 0

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._weight)

    def derive(self) -> None:
        pass

    def drop(self) -> None:
        pass
