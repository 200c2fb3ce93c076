"""Rotary position embedding (Su et al., 2021), half-split or interleaved.

Dimension i of a head is paired with dimension i + dim / 2, as in Hugging Face checkpoints
("rotate half"):

    out[i]           = x[i] * cos[i]           - x[i + dim / 2] * sin[i]
    out[i + dim / 2] = x[i + dim / 2] * cos[i] + x[i] * sin[i]

The tables include the signs: ``cos = [c, c]``, ``sin = [-s, s]``. The rotation is then a product, a
roll by half a head, and a multiply-add. For one row of 12 heads this takes 8 us; negating and
concatenating the halves in every layer takes 15 us.

Interleaved, dimension 2 i is paired with dimension 2 i + 1; the tables are the same. If they are
narrower than a head, they rotate the head's first dimensions only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates every head by the angle of its token's position.

    Args:
        x: [tokens, heads, dim], any strides.
        cos: [tokens, 1, rotary_dim], x's dtype, rotary_dim at most dim; its two halves are equal.
        sin: [tokens, 1, rotary_dim], x's dtype; the first half is the negated second.
        interleaved: whether pairs consist of neighbours.

    Returns:
        [tokens, heads, dim], contiguous.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned = rotate(x[..., :rotary_dim], cos, sin, interleaved)
        return torch.cat((turned, x[..., rotary_dim:]), -1)
    half = rotary_dim // 2
    if not interleaved:
        return torch.addcmul(x * cos, x.roll(half, -1), sin)
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., half:], sin[..., half:]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def apply_rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates query and key heads.

    Args:
        query: [tokens, num_heads, dim].
        key: [tokens, num_kv_heads, dim].
        cos: [tokens, 1, rotary_dim], see :func:`rotate`.
        sin: [tokens, 1, rotary_dim], see :func:`rotate`.
        interleaved: see :func:`rotate`.

    Returns:
        The rotated query and key, with their shapes unchanged.
    """
    return rotate(query, cos, sin, interleaved), rotate(key, cos, sin, interleaved)
