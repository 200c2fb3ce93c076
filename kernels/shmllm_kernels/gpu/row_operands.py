"""What launches of products of few rows compute beside the product."""

from __future__ import annotations

from dataclasses import dataclass

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
class Activation:
    """What is computed of a product.

    Attributes:
        name: as `activation.activate` takes it, or one of `experts.ACTIVATIONS`.
        is_gated: whether the first half of the product, activated, is multiplied by the second.
    """

    name: str
    is_gated: bool
