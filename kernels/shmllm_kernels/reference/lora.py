"""Low-rank adapters: what their two small matrices add to a matrix product."""

from __future__ import annotations

from torch import Tensor


def add_low_rank(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns ``out + scale * (x @ a.T) @ b.T``.

    Args:
        out: [rows, columns], the product with the base's weights.
        x: [rows, k].
        a: [rank, k].
        b: [columns, rank].
        scale: the factor of what is added.
    """
    return out + scale * (x @ a.T) @ b.T
