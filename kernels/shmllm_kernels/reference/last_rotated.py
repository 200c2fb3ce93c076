"""Rows whose last elements rotate, in pairs of neighbours (DeepSeek-AI, "DeepSeek-V4", 2026,
section 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.reference.latent_write import write_rows
from shmllm_kernels.reference.norm import rms_norm
from shmllm_kernels.reference.rope import rotate


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last elements of each head.

    Args:
        x: [tokens, heads, dim].
        cos, sin: [tokens, rope_dim], see ``reference.rope``.

    Returns:
        [tokens, heads, dim].
    """
    still, turned = x.split([x.shape[2] - cos.shape[1], cos.shape[1]], -1)
    return torch.cat([still, rotate(turned, cos[:, None], sin[:, None], interleaved=True)], -1)


def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, eps: float | None = None, is_back: bool = False
) -> Tensor:
    """Divides heads by their root mean square, if there is an eps of it, and rotates their last
    elements, or with `is_back` undoes such a rotation; see `rotate_last`."""
    if eps is not None:
        x = rms_norm(x, x.new_ones(x.shape[2]), eps)
    return rotate_last(x, cos, -sin if is_back else sin)


def store_keys(
    cache: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, slots: Tensor
) -> None:
    """Normalises keys (RMSNorm), rotates their last elements, and writes them to the cache, as
    `latent_write.write_latents` does.

    Args:
        cache: [blocks, block_size, dim].
        x: [tokens, dim].
        weight: [dim], of the norm.
        eps: its eps.
        cos, sin: [tokens, rope_dim].
        slots: [tokens] int64; a token whose slot is -1 is not written.
    """
    normed = rms_norm(x, weight, eps)
    write_rows(cache, rotate_last(normed[:, None], cos, sin)[:, 0], slots)
