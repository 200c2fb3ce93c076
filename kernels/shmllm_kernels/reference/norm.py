"""Root mean square normalisation, alone and fused with the residual addition."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _epsilon(eps: float, device: torch.device) -> Tensor:
    return torch.full((), eps, dtype=torch.float32, device=device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides each row by its root mean square and scales it by ``weight``.

    ``y = weight * (x / sqrt(mean(x**2) + eps))`` over the last dimension (Zhang and
    Sennrich, 2019). The statistics and the quotient are float32. The quotient is rounded to x's
    dtype before the weight is applied, as in the training of the checkpoints.

    Args:
        x: [..., dim], any floating dtype.
        weight: [dim], x's dtype.
        eps: added to the mean square.

    Returns:
        [..., dim] in x's dtype.
    """
    # mean square = |x|^2 / dim: the vector norm takes one pass, square and mean take two.
    wide = x if x.dtype is torch.float32 else x.float()
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_epsilon(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if wide is x:
        return (x * scale).mul_(weight)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds a block's output to the residual stream, in place, and normalises the sum.

    Args:
        x: [..., dim], the output of the previous block.
        residual: [..., dim], x's dtype; becomes the sum.
        weight: [dim], x's dtype.
        eps: added to the mean square.

    Returns:
        ``rms_norm(x + residual)``, [..., dim] in x's dtype.
    """
    return rms_norm(residual.add_(x), weight, eps)
