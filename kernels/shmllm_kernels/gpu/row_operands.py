"""What launches of products of few rows compute beside the product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm of each row of a product.

    Attributes:
        weight: [k], contiguous, the rows' dtype.
        eps: added to the mean square, or to the variance.
        offset: added to the weight, in float32.
        has_mean: whether it is a LayerNorm, which subtracts the mean, or an RMSNorm.
        bias: [k], contiguous, what a LayerNorm adds, or None.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0
    has_mean: bool = False
    bias: Tensor | None = None

    def check(self, k: int) -> None:
        """Asserts that it is a norm of rows of k elements."""
        assert self.weight.shape == (k,), "the norm's weight is [k]"
        assert self.weight.stride(0) == 1, "the norm's weight must be contiguous"
        assert self.has_mean or self.bias is None, "an RMSNorm has no bias"
        assert self.bias is None or self.bias.shape == (k,), "the norm's bias is [k]"
        assert self.bias is None or self.bias.stride(0) == 1, "the norm's bias must be contiguous"


@dataclass(frozen=True, slots=True)
class AddedNorm:
    """What is added to the rows of a product before their norm: the norm of other rows.

    Attributes:
        x: [rows, k], the other rows, each contiguous; the rows' dtype.
        norm: their RMSNorm.
        scale: the factor of the norm in the sum.
        kept: [rows, k], each row contiguous, where the sums are written: ``(rows + scale *
            norm(x)) * factor``, as `norm.add_normed` rounds it. Neither the rows nor ``x``.
        factor: [1], the rows' dtype, the factor of the sums; None: they have none.
    """

    x: Tensor
    norm: RowNorm
    scale: float
    kept: Tensor
    factor: Tensor | None = None

    def check(self, rows: Tensor) -> None:
        """Asserts that it can be added to some rows."""
        assert self.x.shape == self.kept.shape == rows.shape, "a row for each row"
        assert self.x.stride(1) == self.kept.stride(1) == 1, "rows must be contiguous"
        assert self.x.dtype is self.kept.dtype is rows.dtype, "one dtype"
        assert not self.norm.has_mean, "an RMSNorm"
        self.norm.check(rows.shape[1])
        if self.factor is not None:
            assert self.factor.numel() == 1, "one factor"
            assert self.factor.dtype is rows.dtype, "one dtype"
        starts = {each.data_ptr() for each in (self.x, self.kept, rows)}
        assert len(starts) == 3 or rows.is_meta, "sums go elsewhere"


@dataclass(frozen=True, slots=True)
class Activation:
    """What is computed of a product.

    Attributes:
        name: as `activation.activate` takes it, or one of `experts.ACTIVATIONS`.
        is_gated: whether the first half of the product, activated, is multiplied by the second.
    """

    name: str
    is_gated: bool


def is_gated(activation: Activation | None, height: int, columns: int) -> bool:
    """Returns whether a product with a matrix of some rows is gated, and asserts that it has so
    many columns."""
    found = activation is not None and activation.is_gated
    assert height == (2 * columns if found else columns), "weight: rows for each column of out"
    return found


def check_factors(factors: Tensor | None, out: Tensor, adds: bool) -> None:
    """Asserts that a product can be multiplied by some factors."""
    if factors is not None:
        assert factors.shape == out.shape, "factors: one for each element of out"
        assert factors.dtype is out.dtype, "factors and out have one dtype"
        assert factors.stride(1) == 1, "rows of factors must be contiguous"
        assert not adds, "a product with factors is not added to out"


def check_gate_factors(factors: Tensor | None, num_pairs: int, activation: str | None) -> None:
    """Asserts that the gates of so many pairs can be multiplied by some factors."""
    if factors is not None:
        assert factors.numel() == num_pairs, "gate_factors: one for each pair"
        assert factors.dtype is torch.float32, "gate_factors are float32"
        assert factors.is_contiguous(), "gate_factors must be contiguous"
        assert activation in ("silu", "gelu_tanh"), f"{activation} has no gate of its own"


def check_product(out: Tensor, x: Tensor, height: int, k: int, bias: Tensor | None) -> None:
    """Asserts that rows can be multiplied with a matrix [height, k]."""
    assert len(out) == len(x), "out: a row for each of x"
    assert x.shape[1] == k, "x must be as long as rows of weight"
    assert out.stride(1) == x.stride(1) == 1, "rows must be contiguous"
    assert out.dtype is x.dtype, "out and x have one dtype"
    assert out.data_ptr() != x.data_ptr() or out.is_meta, "out may not be x"
    if bias is not None:
        assert bias.shape == (height,), "bias: one for each row of weight"
        assert bias.is_contiguous(), "bias must be contiguous"
