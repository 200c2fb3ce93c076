"""Rotary embedding of a step's query and key heads, and the write of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shmllm_kernels.reference.norm import rms_norm
from shmllm_kernels.reference.rope import apply_rope


class HeadNorms(NamedTuple):
    """RMSNorms or LayerNorms of heads.

    query: the weight of the queries' norm: [dim], for a norm of each head, [num_heads, dim], if
        each head has weights of its own, or [num_heads * dim], for a norm of all side by side; or
        [2, dim], the weight and the bias of a norm of each head.
    key: the weight of the keys' norm, likewise; None: a step has no keys.
    eps: their eps, and that of the values' norm.
    offset: added to these weights.
    has_values: whether value heads have a norm, too, without a weight.
    is_behind: whether queries and keys are normalised behind the rotation, and not before it.
    is_centered: whether the norms of queries and keys are LayerNorms, which are of each head.
    has_bias: whether these have a bias.
    """

    query: Tensor
    key: Tensor | None
    eps: float
    offset: float = 0.0
    has_values: bool = False
    is_behind: bool = False
    is_centered: bool = False
    has_bias: bool = False

    @property
    def centering(self) -> int:
        """What kernels know of `is_centered` and `has_bias`: how many of both hold."""
        return int(self.is_centered) + int(self.has_bias)

    @property
    def has_own(self) -> bool:
        """Whether each head has weights of its own."""
        return self.query.dim() == 2 and not self.has_bias

    @property
    def rounds_once(self) -> bool:
        """Whether the result of a norm is rounded, but not what its weights multiply."""
        return self.is_centered or self.offset != 0


class QueryGrowth(NamedTuple):
    """The factor of queries, ``1 + rate * log(1 + floor((position + offset) / length))`` (Llama 4),
    times ``(1 + (position + offset) / length) ** power`` (Beam).

    rate: the factor of the logarithm.
    length: the number of positions that have the same logarithm.
    offset: added to positions.
    power: the exponent.
    """

    rate: float
    length: int
    offset: int = 0
    power: float = 0.0


def rope_and_write(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    norms: HeadNorms | None = None,
    interleaved: bool = False,
    growth: QueryGrowth | None = None,
    positions: Tensor | None = None,
    values: Tensor | None = None,
) -> None:
    """Normalises and rotates the heads of a step's tokens and writes keys and values to the cache.

    float16, which can overflow, saturates in the cache: attention would multiply an infinite value
    by a masked weight of zero, which gives NaN. FP8 saturates, too, and keeps NaN.

    Args:
        query: [tokens, num_heads, dim]; gets the rotated query heads.
        key_cache: [blocks, block_size, num_kv_heads, dim]; gets the rotated keys, in the dtype of
            ``heads`` or rounded to float8_e4m3fn.
        value_cache: [blocks, block_size, num_kv_heads, value_dim]; gets the values.
        heads: [tokens, num_heads + 2 * num_kv_heads, dim]: query, key and value heads; or
            [tokens, num_heads, dim]: nothing is written to the cache.
        cos: [tokens, 1, rotary_dim], see ``reference.rope``; None: nothing is rotated.
        sin: [tokens, 1, rotary_dim], with its sign, see ``reference.rope``; None with cos.
        slots: [tokens] int64, block * block_size + offset in the block; -1: not written.
        norms: the norms of heads; None: they have none.
        interleaved: see ``reference.rope``.
        growth: the factor of rotated queries; None: they have none.
        positions: [tokens] int64, read with ``growth``.
        values: [tokens, num_kv_heads, value_dim], value heads, where ``heads`` are query and key
            heads; None: the last ones of ``heads`` are values.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    stores = heads.shape[1] > num_heads
    if values is None:
        values = heads[:, num_heads + num_kv_heads :]
    rotated, key, value = heads[:, :num_heads], heads[:, num_heads:][:, :num_kv_heads], values
    if norms is not None and norms.has_values:
        value = rms_norm(value, torch.ones_like(value[0, 0]), norms.eps)
    if norms is not None and not norms.is_behind:
        rotated, key = _normalise_both(rotated, key, norms)
    if cos is not None and sin is not None:
        rotated, key = apply_rope(rotated, key, cos, sin, interleaved)
    if norms is not None and norms.is_behind:
        rotated, key = _normalise_both(rotated, key, norms)
    if growth is not None and positions is not None:
        rotated = rotated * query_factors(positions, growth)[:, None, None].to(rotated.dtype)
    query.copy_(rotated)
    if stores:
        _write(key_cache, value_cache, key, value, slots)


def _write(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    stored = slots >= 0
    blocks, places = slots[stored] // key_cache.shape[1], slots[stored] % key_cache.shape[1]
    for cache, part in ((key_cache, key), (value_cache, value)):
        if part.dtype is torch.float16:
            part = torch.nan_to_num(part, nan=0.0)
        if cache.dtype is torch.float8_e4m3fn:
            part = to_float8(part)
        cache[blocks, places] = part[stored]


def query_factors(positions: Tensor, growth: QueryGrowth) -> Tensor:
    """Returns the factor of the queries of each position, [tokens] float32."""
    places = positions + growth.offset
    power = (1 + places / growth.length) ** growth.power
    return power * (1 + growth.rate * torch.log1p((places // growth.length).float()))


def to_float8(x: Tensor) -> Tensor:
    """Rounds numbers to float8_e4m3fn, those beyond 448 to 448. NaN stays NaN."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn)


def _normalise_both(query: Tensor, key: Tensor, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    query = _normalise(query, norms.query, norms)
    if norms.key is not None:
        key = _normalise(key, norms.key, norms)
    return query, key


def _normalise(heads: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
    if norms.is_centered:
        heads = heads.to(torch.promote_types(heads.dtype, torch.float32))
        centered = heads - heads.mean(-1, keepdim=True)
        scale = (centered.square().mean(-1, keepdim=True) + norms.eps).rsqrt()
        both = weight.to(heads.dtype)
        factor, bias = both if norms.has_bias else (both, 0.0)
        return (centered * scale * (factor + norms.offset) + bias).to(weight.dtype)
    if weight.dim() == 1 and len(weight) != heads.shape[-1]:
        return rms_norm(heads.flatten(-2), weight, norms.eps, norms.offset).view_as(heads)
    return rms_norm(heads, weight, norms.eps, norms.offset)
