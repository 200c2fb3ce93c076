"""Rotation of a step's query and key heads, and where keys and values go in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.reference.norm import rms_norm
from shmllm_kernels.reference.rope import apply_rope


def rope_and_write(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Norms, rotates and stores the heads of a step's tokens.

    float16, which overflows, is saturated where it is stored: an infinite value of a token
    would be NaN for the tokens before it, whose weight for it is zero.

    Args:
        query: [tokens, num_heads, dim], overwritten with the rotated query heads.
        key_cache: [blocks, block_size, num_kv_heads, dim], like ``value_cache``.
        value_cache: takes the values, as ``key_cache`` takes the rotated keys.
        heads: [tokens, num_heads + 2 * num_kv_heads, dim]: query, key and value heads.
        cos: [tokens, 1, dim], sign folded in, see ``reference.rope``.
        sin: [tokens, 1, dim].
        slots: [tokens] int64, block * block_size + place in the block; -1 stores nothing.
        norms: weights of the query's and the key's norm, [dim] each, and their eps.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    rotated, value = heads[:, :num_heads], heads[:, num_heads + num_kv_heads :]
    key = heads[:, num_heads : num_heads + num_kv_heads]
    if norms is not None:
        query_weight, key_weight, eps = norms
        rotated = rms_norm(rotated, query_weight, eps)
        key = rms_norm(key, key_weight, eps)
    rotated, key = apply_rope(rotated, key, cos, sin)
    query.copy_(rotated)
    stored = slots >= 0
    blocks, places = slots[stored] // key_cache.shape[1], slots[stored] % key_cache.shape[1]
    for cache, part in ((key_cache, key), (value_cache, value)):
        if part.dtype is torch.float16:
            part = torch.nan_to_num(part, nan=0.0)
        cache[blocks, places] = part[stored]
