"""The kernel of the attention of decodes, which `decode_attention` launches.

All loads of a program's heads come before what is computed of them, and those that do not depend on
the launch before come before the wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.attention_kernels import (
    LOG2_E,
    attend_tiles,
    attend_to_tile,
    load_tile,
)
from shmllm_kernels.gpu.float8 import from_cache
from shmllm_kernels.gpu.functions import tanh
from shmllm_kernels.gpu.rope_write import stored


@triton.jit
def _partners(ROTARY_HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Returns, for each element of a head that is rotated, the one it is rotated with, their number
    as a pair, and whether it is the second of them."""
    dims = tl.arange(0, DIM_PADDED)
    if IS_INTERLEAVED:
        pair, is_second = dims // 2, dims % 2 == 1
        partner = tl.where(is_second, dims - 1, dims + 1)
    else:
        half: tl.constexpr = max(ROTARY_HALF, 1)
        pair, is_second = dims % half, dims >= half
        partner = tl.where(is_second, dims - half, dims + half)
    return partner, pair, is_second


@triton.jit
def _load_heads(
    rows, is_row, partner, ROTARY_HALF: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Returns heads given by their addresses, [rows, DIM_PADDED], and for each element its
    partner."""
    dims = tl.arange(0, DIM_PADDED)
    x = tl.load(
        rows[:, None] + dims[None, :], mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0
    )
    other = x
    if ROTARY_HALF:
        wanted = is_row[:, None] & (dims < 2 * ROTARY_HALF)[None, :]
        other = tl.load(rows[:, None] + partner[None, :], mask=wanted, other=0.0)
    return x.to(tl.float32), other.to(tl.float32)


@triton.jit
def _load_weights(
    weight_ptr, partner, offset,
    HAS_NORM: tl.constexpr, ROTARY_HALF: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns a norm's weight for each element of a head and for its partner, or 1."""
    weight, other = 1.0, 1.0
    if HAS_NORM:
        dims = tl.arange(0, DIM_PADDED)
        weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32) + offset
        other = weight
        if ROTARY_HALF:
            is_rotated = dims < 2 * ROTARY_HALF
            other = (
                tl.load(weight_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32) + offset
            )
    return weight, other


@triton.jit
def _rotated(
    x, other, weight, other_weight, cos, sin, eps,
    dtype: tl.constexpr, ROTARY_HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Returns normalised and rotated heads, float32. It rounds where the reference does, but not
    the result. The sine has the sign with which the partner counts."""
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = _scaled(x, scale, weight, dtype, HAS_OFFSET)
        other = _scaled(other, scale, other_weight, dtype, HAS_OFFSET)
    if ROTARY_HALF:
        x = x * cos[None, :] + other * sin[None, :]
    return x


@triton.jit
def _scaled(x, scale, weight, dtype: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """Returns heads times their scale and the norm's weight."""
    x *= scale
    if not HAS_OFFSET:
        x = x.to(dtype).to(tl.float32)
    return (x * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, pair, is_second, ROTARY_HALF: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Returns the cosine for each element of a head, and the sine with the sign with which its
    partner counts."""
    cos, sin = 1.0, 0.0
    if ROTARY_HALF:
        is_rotated = tl.arange(0, DIM_PADDED) < 2 * ROTARY_HALF
        # The second half of each table has the sign of the cosine or sine itself.
        angle = ROTARY_HALF + pair
        cos = tl.load(cos_ptr + angle, mask=is_rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=is_rotated, other=0.0).to(tl.float32)
        sin = tl.where(is_second, sin, -sin)
    return cos, sin


@triton.jit
def _tiles_of(
    position, window, HAS_WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the first key that a token attends to, the tiles of this program's part of the keys
    before its own, and the number of parts that have keys: at least one."""
    keys_begin = position * 0
    if HAS_WINDOW:
        keys_begin = tl.maximum(position - window + 1, 0)
    lowest = keys_begin // TILE
    highest = tl.cdiv(position, TILE)
    num_parts = position * 0 + 1
    if NUM_SPLITS > 1:
        # A part has 2 * BLOCK_M keys or more: its sums are not more bytes than its keys and values.
        fewest: tl.constexpr = max(2 * BLOCK_M // TILE, 1)
        per_split = tl.maximum(tl.cdiv(highest - lowest, NUM_SPLITS), fewest)
        num_parts = tl.maximum(tl.cdiv(highest - lowest, per_split), 1)
        lowest += tl.program_id(1) * per_split
        highest = tl.minimum(lowest + per_split, highest)
    return keys_begin, lowest, highest, num_parts


@triton.jit
def _store_part(
    sums, peak, total, part_sums_ptr, part_stats_ptr, part, is_row,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores what a program has summed up: a part is [heads of a kv head, DIM]."""
    rows, dims = tl.arange(0, sums.shape[0]), tl.arange(0, DIM_PADDED)
    place = part + rows
    tl.store(part_stats_ptr + 2 * place, peak, mask=is_row)
    tl.store(part_stats_ptr + 2 * place + 1, total, mask=is_row)
    places = part_sums_ptr + place[:, None] * DIM + dims[None, :]
    tl.store(places, sums, mask=is_row[:, None] & (dims < DIM)[None, :])


@triton.jit
def _join_parts(
    out_ptr, part_sums_ptr, part_stats_ptr, first_part, num_parts,
    NUM_SPLITS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Joins the parts of the heads that share a kv head, some heads at a time."""
    splits, heads, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, HEADS), tl.arange(0, DIM_PADDED)
    is_part, is_dim = splits < num_parts, dims < DIM
    for first in tl.static_range(0, HEADS_PER_KV, HEADS):
        head = first + heads
        is_head = head < HEADS_PER_KV
        place = first_part + splits[:, None] * HEADS_PER_KV + head[None, :]
        is_wanted = is_part[:, None] & is_head[None, :]
        peaks = tl.load(part_stats_ptr + 2 * place, mask=is_wanted, other=float("-inf"))
        totals = tl.load(part_stats_ptr + 2 * place + 1, mask=is_wanted, other=0.0)
        places = part_sums_ptr + place[:, :, None] * DIM + dims[None, None, :]
        wanted = is_wanted[:, :, None] & is_dim[None, None, :]
        sums = tl.load(places, mask=wanted, other=0.0)
        highest = tl.where(is_head, tl.max(peaks, axis=0), 0.0)
        shares = tl.exp2(peaks - highest[None, :])
        total = tl.where(is_head, tl.sum(totals * shares, axis=0), 1.0)
        joined = tl.sum(sums * shares[:, :, None], axis=0) / total[:, None]
        target = out_ptr + head[:, None] * DIM + dims[None, :]
        mask = is_head[:, None] & is_dim[None, :]
        tl.store(target, joined.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normed_value(value, eps, HAS_NORM: tl.constexpr, DIM: tl.constexpr):
    """Returns a value head, [1, DIM_PADDED] float32, with its norm."""
    if HAS_NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None]
    return value


@triton.jit
def _attend_to_one(
    sums, peak, total, query, key, value, is_seen, scale, cap,
    HAS_CAP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Updates the online softmax of all rows with one key, [1, DIM_PADDED], if it is seen."""
    scores = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
    if HAS_CAP:
        scores = cap * tanh(scores)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, scores)
    weights = tl.exp2(scores - new_peak)
    shrink = tl.exp2(peak - new_peak)
    sums *= shrink[:, None]
    sums += weights.to(dtype).to(tl.float32)[:, None] * value.to(tl.float32)
    return sums, new_peak, total * shrink + weights


@triton.jit(do_not_specialize=["window"])
def attend_decodes(
    out_ptr,
    heads_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    sinks_ptr,
    part_sums_ptr,
    part_stats_ptr,
    counters_ptr,
    scale,
    cap,
    window,
    eps,
    offset,
    out_token_stride,
    heads_token_stride,
    cos_stride,
    sin_stride,
    block_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
    request = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    token = tl.load(starts_ptr + request).to(tl.int64)
    is_padding = tl.load(starts_ptr + request + 1) == token
    position = tl.load(contexts_ptr + request) - 1
    # The tiles of this program; the new key at `position` is not in them.
    keys_begin, lowest, highest, num_parts = _tiles_of(
        position, window, HAS_WINDOW, NUM_SPLITS, BLOCK_M, TILE
    )
    if is_padding | (split >= num_parts):
        if IS_DEPENDENT:
            gdc_wait()
        return
    table_ptr += request.to(tl.int64) * table_stride
    key_ptr += kv_head * kv_head_stride
    value_ptr += kv_head * kv_head_stride
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PADDED)
    is_row = rows < HEADS_PER_KV
    partner, pair, is_second = _partners(ROTARY_HALF, IS_INTERLEAVED, DIM_PADDED)
    query_weights = _load_weights(
        query_weight_ptr, partner, offset, HAS_NORM, ROTARY_HALF, DIM, DIM_PADDED
    )
    key_weights = _load_weights(
        key_weight_ptr, partner, offset, HAS_NORM, ROTARY_HALF, DIM, DIM_PADDED
    )
    slot = tl.load(slots_ptr + token)
    first_keys = lowest * TILE + tl.arange(0, TILE)
    if LOADS_FIRST:
        first_key, first_value = load_tile(
            first_keys, keys_begin, position, key_ptr, value_ptr, table_ptr, block_stride,
            token_stride, True, BLOCK_SIZE, DIM, DIM_PADDED,
        )  # fmt: skip
    if IS_DEPENDENT:
        gdc_wait()

    # All loads come before what is computed of them: each round trip takes 0.6 us.
    heads = kv_head * HEADS_PER_KV + rows
    source = heads_ptr + token * heads_token_stride
    one = tl.arange(0, 1)
    own = source + (NUM_KV_HEADS * HEADS_PER_KV + kv_head) * DIM + one
    query, other_query = _load_heads(
        source + heads * DIM, is_row, partner, ROTARY_HALF, DIM, DIM_PADDED
    )
    key, other_key = _load_heads(own, one == 0, partner, ROTARY_HALF, DIM, DIM_PADDED)
    value_place = own[:, None] + NUM_KV_HEADS * DIM + dims[None, :]
    value = tl.load(value_place, mask=(dims < DIM)[None, :], other=0.0).to(tl.float32)
    cos, sin = _load_angles(
        cos_ptr + token * cos_stride, sin_ptr + token * sin_stride, pair, is_second,
        ROTARY_HALF, DIM_PADDED,
    )  # fmt: skip
    query = _rotated(
        query, other_query, *query_weights, cos, sin, eps, dtype, ROTARY_HALF, HAS_NORM, HAS_OFFSET,
        DIM,
    ).to(dtype)  # fmt: skip
    key = _rotated(
        key, other_key, *key_weights, cos, sin, eps, dtype, ROTARY_HALF, HAS_NORM, HAS_OFFSET, DIM
    )
    cache_dtype: tl.constexpr = key_ptr.dtype.element_ty
    new_key = stored(key, dtype, cache_dtype)
    value = _normed_value(value, eps, HAS_VALUE_NORM, DIM)
    new_value = stored(value, dtype, cache_dtype)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + dims[None, :]
    is_first = split == 0
    is_written = (dims < DIM)[None, :] & (slot >= 0) & is_first
    tl.store(key_ptr + place, new_key, mask=is_written)
    tl.store(value_ptr + place, new_value, mask=is_written)

    sums = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        # A sink is one more key of the first part, whose value is zero.
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(is_first, sinks, float("-inf"))
        total = tl.where(is_first, 1.0, total)
    positions = tl.zeros((BLOCK_M,), tl.int32) + position
    if LOADS_FIRST:
        sums, peak, total = attend_to_tile(
            sums, peak, total, query, first_key, first_value, first_keys, positions, positions,
            keys_begin, position, scale, cap, window, True, HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
        lowest += 1
    sums, peak, total = attend_tiles(
        sums, peak, total, query, positions, positions, lowest, highest, keys_begin, position,
        key_ptr, value_ptr, table_ptr, block_stride, token_stride, scale, cap, window,
        True, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, TILE, DIM, DIM_PADDED,
    )  # fmt: skip
    sums, peak, total = _attend_to_one(
        sums, peak, total, query, from_cache(new_key, dtype, 1), from_cache(new_value, dtype, 1),
        is_first, scale, cap, HAS_CAP, dtype,
    )  # fmt: skip

    out_ptr += token * out_token_stride + kv_head * HEADS_PER_KV * DIM
    if NUM_SPLITS == 1:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        places = out_ptr + (rows * DIM)[:, None] + dims[None, :]
        tl.store(places, result.to(dtype), mask=is_row[:, None] & (dims < DIM)[None, :])
    else:
        first_part = (token * NUM_KV_HEADS + kv_head) * (NUM_SPLITS * HEADS_PER_KV)
        _store_part(
            sums, peak, total, part_sums_ptr, part_stats_ptr, first_part + split * HEADS_PER_KV,
            is_row, DIM, DIM_PADDED,
        )  # fmt: skip
        tl.debug_barrier()  # all of this program's part is written before it counts itself
        counter = counters_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(counter, 0)
            _join_parts(
                out_ptr, part_sums_ptr, part_stats_ptr, first_part, num_parts,
                NUM_SPLITS, HEADS_PER_KV, HEADS_AT_ONCE, DIM, DIM_PADDED,
            )  # fmt: skip
