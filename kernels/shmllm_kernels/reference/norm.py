"""RMSNorm and LayerNorm, alone and fused with the residual addition."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache(maxsize=64)
def _epsilon(eps: float, device: torch.device) -> Tensor:
    return torch.full((), eps, dtype=torch.float32, device=device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Divides each row by its root mean square and scales it by ``weight + offset``.

    ``y = (weight + offset) * (x / sqrt(mean(x**2) + eps))`` over the last dimension (Zhang and
    Sennrich, 2019). The statistics and the quotient are float32, or x's float64. Without an
    offset, the quotient is rounded to x's dtype before the weight is applied, as in the training of
    the checkpoints; with one, only the result is rounded.

    Args:
        x: [..., dim], any floating dtype.
        weight: [dim], x's dtype.
        eps: added to the mean square.
        offset: added to the weight, in float32.

    Returns:
        [..., dim] in x's dtype.
    """
    # mean square = |x|^2 / dim: the vector norm takes one pass, square and mean take two.
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_epsilon(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if offset:
        return (wide * scale).mul_(weight.to(wide.dtype) + offset).to(x.dtype)
    if wide is x:
        return (x * scale).mul_(weight)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: float = 1.0,
    offset: float = 0.0,
) -> Tensor:
    """Adds a block's output to the residual stream, in place, and normalises the sum.

    Args:
        x: [..., dim], the output of the previous block.
        residual: [..., dim], x's dtype; becomes the sum.
        weight: [dim], x's dtype.
        eps: added to the mean square.
        scale: the factor of ``x`` in the sum.
        offset: added to the weight, in float32.

    Returns:
        ``rms_norm(scale * x + residual)``, [..., dim] in x's dtype.
    """
    return rms_norm(residual.add_(x, alpha=scale), weight, eps, offset)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
) -> Tensor:
    """Returns ``(weight + offset) * (x - mean(x)) / sqrt(var(x) + eps) + bias`` over the last
    dimension (Ba et al., 2016), computed in float32.

    Args:
        x: [..., dim], any floating dtype.
        weight: [dim], x's dtype.
        bias: [dim], x's dtype, or None.
        eps: added to the variance.
        offset: added to the weight, in float32.

    Returns:
        [..., dim] in x's dtype.
    """
    added = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float() + offset, added, eps).to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    scale: float = 1.0,
    offset: float = 0.0,
) -> Tensor:
    """Adds ``scale * x`` to the residual stream, in place, and returns `layer_norm` of the sum. The
    arguments are those of `add_rms_norm` and `layer_norm`."""
    return layer_norm(residual.add_(x, alpha=scale), weight, bias, eps, offset)
