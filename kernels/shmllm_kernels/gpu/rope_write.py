"""Normalises and rotates a step's query and key heads, and writes keys and values to the cache.

One launch replaces two norms, a rotation and two scattered copies. A program computes a few query
heads, key heads or value heads of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.float8 import as_stored, to_cache
from shmllm_kernels.gpu.rotated_heads import (
    NORM_BEFORE,
    NORM_BEHIND,
    norm_order,
    normed_value,
    query_factor,
)
from shmllm_kernels.reference.rope_write import HeadNorms, QueryGrowth

HEADS_PER_PROGRAM = 8
_FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def _mean(first, second, HALF: tl.constexpr):
    """Returns the means of heads, which are given as pairs of elements."""
    return ((tl.sum(first, axis=1) + tl.sum(second, axis=1)) / (2 * HALF))[:, None]


@triton.jit
def _scale(first, second, eps, HALF: tl.constexpr):
    """Returns what RMSNorm multiplies heads by, which are given as pairs of elements."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def _normed(
    first, second, weights, first_place, second_place, inside, eps, offset, dtype: tl.constexpr,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
    CENTERING: tl.constexpr,
):  # fmt: skip
    """Applies a norm, if there is one, to heads given as pairs of elements, and rounds where the
    reference does. weights: pointers to those of each head, [heads, 1], or of all, [1, 1], behind
    which biases are."""
    if HAS_NORM:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        if CENTERING:
            mean = _mean(first, second, HALF)
            first = tl.where(inside[None, :], first - mean, 0.0)
            second = tl.where(inside[None, :], second - mean, 0.0)
        scale = _scale(first, second, eps, HALF)
        low = tl.load(weights + first_place[None, :], mask=inside[None, :], other=0.0)
        high = tl.load(weights + second_place[None, :], mask=inside[None, :], other=0.0)
        low, high = low.to(tl.float32) + offset, high.to(tl.float32) + offset
        first, second = first * scale, second * scale
        if not ROUNDS_ONCE:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first, second = first * low, second * high
        if CENTERING == 2:
            biases = weights + 2 * HALF
            low = tl.load(biases + first_place[None, :], mask=inside[None, :], other=0.0)
            high = tl.load(biases + second_place[None, :], mask=inside[None, :], other=0.0)
            first, second = first + low.to(tl.float32), second + high.to(tl.float32)
        first, second = first.to(dtype), second.to(dtype)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def stored(x, dtype: tl.constexpr, cache_dtype: tl.constexpr):
    """Converts a value to the model's dtype and that to the cache's; float16 saturates, since 0
    times infinity is NaN."""
    if dtype == tl.float16:
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -_FLOAT16_MAX), _FLOAT16_MAX)
    return to_cache(x.to(dtype), cache_dtype)


@triton.jit
def _rope_write(
    query_ptr,
    key_ptr,
    value_ptr,
    heads_ptr,
    new_values_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_weight_ptr,
    key_weight_ptr,
    query_token_stride,
    query_head_stride,
    heads_token_stride,
    heads_head_stride,
    values_token_stride,
    values_head_stride,
    cos_stride,
    sin_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    block_size,
    eps,
    offset,
    growth,
    positions_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    CENTERING: tl.constexpr,
    HAS_OWN_NORMS: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    is_query = group < query_groups
    is_value = group >= query_groups + kv_groups
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if not is_query and slot < 0:
        return

    first_head = tl.where(
        is_query, group, tl.where(is_value, group - kv_groups, group) - query_groups
    )
    head = first_head * HEADS + tl.arange(0, HEADS)
    present = head < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    block, place = slot // block_size, slot % block_size
    cached = block * cache_block_stride + place * cache_token_stride
    cached += head[:, None] * cache_head_stride
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    cache_dtype: tl.constexpr = key_ptr.dtype.element_ty
    if is_value:
        dims = tl.arange(0, VALUE_PADDED)
        mask = present[:, None] & (dims < VALUE_DIM)[None, :]
        source = new_values_ptr + token * values_token_stride + head[:, None] * values_head_stride
        value = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        value = normed_value(value, eps, HAS_VALUE_NORM, VALUE_DIM)
        stored_value = stored(value, dtype, cache_dtype)
        tl.store(value_ptr + cached + dims[None, :], stored_value, mask=mask)
        return

    pairs = tl.arange(0, PAIRS)
    inside = pairs < HALF
    # The elements that are not rotated are pairs, too, behind those that are.
    if IS_INTERLEAVED:
        first_place, second_place = 2 * pairs, 2 * pairs + 1
    else:
        is_rotated = pairs < ROTARY_HALF
        first_place = tl.where(is_rotated, pairs, ROTARY_HALF + pairs)
        second_place = tl.where(is_rotated, ROTARY_HALF + pairs, HALF + pairs)
    mask = present[:, None] & inside[None, :]
    source = heads_ptr + token * heads_token_stride
    source += (tl.where(is_query, 0, NUM_HEADS) + head)[:, None] * heads_head_stride
    first = tl.load(source + first_place[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + second_place[None, :], mask=mask, other=0.0).to(tl.float32)

    weight_ptr = query_weight_ptr
    if not is_query:
        weight_ptr = key_weight_ptr
    weights = weight_ptr + tl.zeros((1, 1), tl.int32)
    if HAS_OWN_NORMS:
        weights = weight_ptr + tl.where(present, head, 0)[:, None] * (2 * HALF)
    first, second = _normed(
        first, second, weights, first_place, second_place, inside, eps, offset, dtype, HALF,
        NORM == NORM_BEFORE, ROUNDS_ONCE, CENTERING,
    )  # fmt: skip
    if ROTARY_HALF:
        # The second half of each table has the sign of the cosine or sine itself.
        has_angle = pairs < ROTARY_HALF
        angle = token * cos_stride + ROTARY_HALF + pairs
        cos = tl.load(cos_ptr + angle, mask=has_angle, other=1.0).to(tl.float32)[None, :]
        angle = token * sin_stride + ROTARY_HALF + pairs
        sin = tl.load(sin_ptr + angle, mask=has_angle, other=0.0).to(tl.float32)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
    first, second = _normed(
        first, second, weights, first_place, second_place, inside, eps, offset, dtype, HALF,
        NORM == NORM_BEHIND, ROUNDS_ONCE, CENTERING,
    )  # fmt: skip
    if is_query:
        if growth is not None:
            factor = query_factor(tl.load(positions_ptr + token), growth)
            first, second = first * factor, second * factor
        target = query_ptr + token * query_token_stride
        target += head[:, None] * query_head_stride
        tl.store(target + first_place[None, :], first.to(dtype), mask=mask)
        tl.store(target + second_place[None, :], second.to(dtype), mask=mask)
    else:
        keys = key_ptr + cached
        tl.store(keys + first_place[None, :], stored(first, dtype, cache_dtype), mask=mask)
        tl.store(keys + second_place[None, :], stored(second, dtype, cache_dtype), mask=mask)


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
    """Computes the same as ``reference.rope_write.rope_and_write``, with float32 intermediates.

    Args:
        query: [tokens, num_heads, dim], heads contiguous; may be the query part of ``heads``, and
            have no heads.
        key_cache: [blocks, block_size, num_kv_heads, dim], heads contiguous, any other strides;
            float8_e4m3fn or the dtype of ``heads``.
        value_cache: [blocks, block_size, num_kv_heads, value_dim], the same strides and dtype.
        heads: [tokens, num_heads + 2 * num_kv_heads, dim], heads contiguous; float32, float16
            or bfloat16, like all tensors but the caches and ``slots``; or [tokens, num_heads, dim]:
            nothing is written to the cache.
        cos: [tokens, 1, rotary_dim] or [tokens, rotary_dim], the last dimension contiguous. Only
            the second half is read. None: nothing is rotated.
        sin: as ``cos``.
        slots: [tokens] int64; the keys and values of a token whose slot is -1 are not written.
        norms: norms of each head, with weights of [dim], or [num_heads, dim] and
            [num_kv_heads, dim], or weights and biases of [2, dim]; None: heads have none.
        interleaved: whether neighbouring elements are rotated together, and not those of the two
            halves of the first ``rotary_dim`` elements.
        growth: the factor of rotated queries; None: they have none.
        positions: [tokens] int64, contiguous, read with ``growth``.
        values: [tokens, num_kv_heads, value_dim], heads contiguous, in the dtype of ``heads``,
            which are query and key heads then; None: the last ones of ``heads`` are values.

    Reads and writes every element of ``heads`` once: 24 KiB for a token of 48 heads of 128; 6 flops
    for each rotated pair, 8 more with norms. One launch a layer: 2 us for one token, 47 us for
    8,192.
    """
    tokens, num_heads, dim = query.shape
    num_kv_heads = key_cache.shape[2] if heads.shape[1] > num_heads else 0
    if values is None:
        heads, values = heads.split_with_sizes([heads.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    tables = heads, heads
    if cos is not None and sin is not None:
        tables = cos.view(tokens, cos.shape[-1]), sin.view(tokens, sin.shape[-1])
    _check(query, key_cache, value_cache, heads, values, *tables, slots)
    if growth is not None:
        assert positions is not None, "growth needs positions"
        assert positions.shape == (tokens,), "positions: one per token"
        assert positions.stride(0) == 1 or tokens < 2, "positions must be contiguous"
    if tokens == 0:
        return
    weights = weights_of(norms, (num_heads, num_kv_heads), dim, heads)
    has_own = norms is not None and norms.has_own
    known = norms is None or has_own or norms.has_bias or norms.query.shape == (dim,)
    assert known, "norms are of each head"
    per_program = min(HEADS_PER_PROGRAM, next_power_of_two(max(num_heads, num_kv_heads)))
    groups = triton.cdiv(num_heads, per_program) + 2 * triton.cdiv(num_kv_heads, per_program)
    _rope_write[(tokens, groups)](
        query,
        as_stored(key_cache, heads.dtype),
        as_stored(value_cache, heads.dtype),
        heads,
        values,
        *tables,
        slots,
        *weights,
        query.stride(0),
        query.stride(1),
        heads.stride(0),
        heads.stride(1),
        values.stride(0),
        values.stride(1),
        *(table.stride(0) for table in tables),
        *key_cache.stride()[:3],
        key_cache.shape[1],
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.offset,
        growth,
        positions,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=dim // 2,
        ROTARY_HALF=0 if cos is None else cos.shape[-1] // 2,
        IS_INTERLEAVED=interleaved,
        NORM=norm_order(norms),
        ROUNDS_ONCE=norms is not None and norms.rounds_once,
        CENTERING=0 if norms is None else norms.centering,
        HAS_OWN_NORMS=has_own,
        HAS_VALUE_NORM=norms is not None and norms.has_values,
        HEADS=per_program,
        PAIRS=next_power_of_two(dim // 2),
        VALUE_DIM=value_cache.shape[3],
        VALUE_PADDED=next_power_of_two(value_cache.shape[3]),
        num_warps=4,
    )


def weights_of(
    norms: HeadNorms | None, counts: tuple[int, int], dim: int, heads: Tensor
) -> list[Tensor]:
    """Returns the weights of the queries' and keys' norms, for these numbers of heads, or others
    that are not read."""
    if norms is None:
        return [heads, heads]
    known = [norms.query] if norms.key is None else [norms.query, norms.key]
    for weight, count in zip(known, counts, strict=False):
        shapes = ((2, dim),) if norms.has_bias else ((dim,), (count, dim), (count * dim,))
        assert weight.shape in shapes, f"a norm's weight has one of the shapes {shapes}"
        assert weight.dtype is heads.dtype, "all floating tensors have one dtype"
        assert weight.is_contiguous(), "a norm's weight must be contiguous"
    return [known[0], known[-1]]


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
) -> None:
    tokens, num_heads, dim = query.shape
    num_kv_heads = heads.shape[1] - num_heads
    assert dim % 2 == 0, f"a head of {dim} elements has no halves"
    assert heads.shape == (tokens, heads.shape[1], dim), "heads: query, key, value"
    assert num_kv_heads in (0, key_cache.shape[2]), "heads: query, key, value"
    of_values = tokens, num_kv_heads, value_cache.shape[3]
    assert not num_kv_heads or values.shape == of_values, "values: one for each kv head"
    assert key_cache.shape[3] == dim, "the cache has heads of another size"
    assert key_cache.shape[:3] == value_cache.shape[:3], "key_cache and value_cache differ in shape"
    assert key_cache.stride() == value_cache.stride(), "key_cache and value_cache differ in strides"
    for tensor in (query, key_cache, value_cache, heads, values, cos, sin):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
    for tensor in (query, values, cos, sin):
        assert tensor.dtype is heads.dtype, "all floating tensors have one dtype"
    assert key_cache.dtype is value_cache.dtype, "key_cache and value_cache differ in dtype"
    assert slots.shape == (tokens,), "slots: one per token"
    assert slots.dtype is torch.int64, "slots are int64"
    assert slots.stride(0) == 1 or tokens < 2, "slots must be contiguous"
