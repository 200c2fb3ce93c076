"""Norm and rotary embedding of a step's latents, and their write to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.reference.norm import rms_norm
from shmllm_kernels.reference.rope import rotate
from shmllm_kernels.reference.rope_write import to_float8


def write_latents(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    interleaved: bool = False,
) -> None:
    """Normalises latents, rotates key parts, and writes both to the cache.

    float16, which can overflow, saturates in the cache: attention would multiply an infinite value
    by a masked weight of zero, which gives NaN. FP8 saturates, too, and keeps NaN.

    Args:
        cache: [blocks, block_size, rank + rope_dim], in the dtype of ``x`` or float8_e4m3fn.
        x: [tokens, rank + rope_dim], a latent and a key part side by side.
        weight: [rank], that of the latents' norm.
        eps: that of the latents' norm.
        cos: [tokens, 1, rope_dim], see ``reference.rope``.
        sin: [tokens, 1, rope_dim], with its sign, see ``reference.rope``.
        slots: [tokens] int64, block * block_size + offset in the block; -1: not written.
        interleaved: see ``reference.rope``.
    """
    latents, keys = x.split([len(weight), x.shape[1] - len(weight)], -1)
    keys = rotate(keys[:, None], cos, sin, interleaved)[:, 0]
    write_rows(cache, torch.cat([rms_norm(latents, weight, eps), keys], -1), slots)


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes rows [tokens, width] to slots of a cache; see `write_latents`."""
    if rows.dtype is torch.float16:
        rows = rows.nan_to_num().clamp(-65504.0, 65504.0)
    if cache.dtype is torch.float8_e4m3fn:
        rows = to_float8(rows)
    exists = slots >= 0
    blocks, places = slots[exists] // cache.shape[1], slots[exists] % cache.shape[1]
    cache[blocks, places] = rows[exists]
