"""The kernel of the attention of decodes, which `decode_attention` launches.

A program's rows are the query heads that share a kv head, of a request's first token, then of its
second. Its loads come first, and those that do not depend on the launch before precede all others.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.attention_kernels import (
    LOG2_E,
    attend_tiles,
    attend_to_tile,
    first_visible,
    load_tile,
)
from shmllm_kernels.gpu.decode_keys import attend_to_new
from shmllm_kernels.gpu.decode_operands import Part
from shmllm_kernels.gpu.decode_parts import (
    OutputRows,
    finish_part,
    gates_of,
    load_gates,
    store_rows,
    tiles_of,
)
from shmllm_kernels.gpu.decode_rows import (
    angles_of_rows,
    key_head_with_norm,
    places_of,
    query_heads_with_norms,
    scale_of_all_heads,
)
from shmllm_kernels.gpu.float8 import converts_slowly, from_cache
from shmllm_kernels.gpu.grid_meeting import await_arrivals
from shmllm_kernels.gpu.rope_write import stored
from shmllm_kernels.gpu.rotated_heads import (
    load_angles,
    load_biases,
    load_heads,
    load_weights,
    normed_value,
    partners,
    query_factor,
    rotated,
)
from shmllm_kernels.gpu.weights_ahead import ask_ahead


@triton.jit
def _new_tokens(starts_ptr, request, MAX_TOKENS: tl.constexpr):
    """Returns the first new token of a request, their number, and whether there are none."""
    token = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - token
    is_padding = query_len == 0
    if MAX_TOKENS == 1:
        query_len = 1
    return token.to(tl.int64), query_len, is_padding


@triton.jit
def part_of(
    step, request, kv_head, split, window, HAS_WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr,
    FEWEST_KEYS: tl.constexpr, TILE: tl.constexpr, MAX_TOKENS: tl.constexpr, SEES_NEW: tl.constexpr,
):  # fmt: skip
    """Returns a part of a request's context."""
    token, query_len, is_padding = _new_tokens(step.starts, request, MAX_TOKENS)
    num_new = query_len if SEES_NEW else 0
    position = tl.load(step.contexts + request) - num_new  # of the first new key, or behind all
    keys_begin, lowest, highest, num_parts = tiles_of(
        position, window, split, HAS_WINDOW, NUM_SPLITS, FEWEST_KEYS, TILE
    )
    is_idle = is_padding | (split >= num_parts)
    return Part(
        request, kv_head, split, token, query_len, position, keys_begin, lowest, highest, num_parts,
        is_idle,
    )  # fmt: skip


@triton.jit
def attend_part(
    part, layer, strides, numbers, window, memory, gates, growth, ahead, meeting,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    ROTARY_HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr, CENTERING: tl.constexpr, HAS_OWN_NORMS: tl.constexpr,
    NORM_TOKENS: tl.constexpr, HAS_VALUE_NORM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MAX_TOKENS: tl.constexpr, NEW_KEYS: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
    HAS_KEYS: tl.constexpr, LOADS_FIRST: tl.constexpr, IS_DEPENDENT: tl.constexpr,
    SEES_NEW: tl.constexpr,
):  # fmt: skip
    """Computes a part that is not idle.

    Args:
        part: the part.
        layer, strides, numbers, memory: see their classes.
        window: see `windows.window_number`.
        gates: see their class; None: there are none.
        growth: the factor of queries, see `QueryGrowth`; None: they have none.
        ahead: the weights that the cache is asked for; None: none.
        meeting: the meeting of the programs of this launch behind which the heads are there; None:
            an earlier launch has written them.
    """
    token, query_len, position = part.token, part.query_len, part.position
    kv_head, lowest = part.kv_head, part.lowest
    table_ptr = layer.table + part.request.to(tl.int64) * strides.table
    table_ptr += kv_head * strides.table_head
    key_ptr = layer.key_cache + kv_head * strides.kv_head
    value_ptr = layer.value_cache + kv_head * strides.kv_head
    dtype: tl.constexpr = layer.heads.dtype.element_ty
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PADDED)
    is_row = rows < query_len * HEADS_PER_KV
    new = tl.arange(0, NEW_KEYS)
    is_new = new < query_len
    partner, pair, is_second = partners(ROTARY_HALF, IS_INTERLEAVED, DIM_PADDED)
    query_heads = query_heads_with_norms(rows, kv_head, HAS_OWN_NORMS, HEADS_PER_KV)
    key_heads = key_head_with_norm(kv_head, HAS_OWN_NORMS)
    query_weights = load_weights(
        layer.query_weight, query_heads, partner, numbers.offset, NORM, ROTARY_HALF, DIM,
        DIM_PADDED,
    )  # fmt: skip
    key_weights = load_weights(
        layer.key_weight, key_heads, partner, numbers.offset, NORM, ROTARY_HALF, DIM,
        DIM_PADDED,
    )  # fmt: skip
    query_biases = load_biases(layer.query_weight, partner, CENTERING, ROTARY_HALF, DIM, DIM_PADDED)
    key_biases = load_biases(layer.key_weight, partner, CENTERING, ROTARY_HALF, DIM, DIM_PADDED)
    slot = tl.load(layer.slots + token + new, mask=is_new, other=-1)[:, None]
    value_dims = tl.arange(0, VALUE_PADDED)
    place = slot // BLOCK_SIZE * strides.block + slot % BLOCK_SIZE * strides.token
    key_place, value_place = place + dims[None, :], place + value_dims[None, :]
    is_key = (dims < DIM)[None, :] & (slot >= 0)
    is_value = (value_dims < VALUE_DIM)[None, :] & (slot >= 0)
    tile_keys = lowest * TILE + tl.arange(0, TILE)
    # A first tile that integer operations convert would spill in the loop behind it.
    HAS_FIRST: tl.constexpr = LOADS_FIRST and not converts_slowly(layer.key_cache.dtype.element_ty)
    if HAS_FIRST:
        first_key, first_value = load_tile(
            tile_keys, part.keys_begin, position, key_ptr, value_ptr, table_ptr, strides.block,
            strides.token, True, BLOCK_SIZE, DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip
    if IS_DEPENDENT:
        gdc_wait()
    await_arrivals(meeting)

    # All loads come before what is computed of them: each round trip takes 0.6 us.
    source = layer.heads + token * strides.heads + kv_head * (HEADS_PER_KV * DIM)
    cos_ptr = layer.cos + token * strides.cos
    sin_ptr = layer.sin + token * strides.sin
    query, other_query = load_heads(
        source + places_of(rows, strides.heads, HEADS_PER_KV, DIM, MAX_TOKENS), is_row,
        partner, ROTARY_HALF, DIM, DIM_PADDED,
    )  # fmt: skip
    if HAS_KEYS:
        own = layer.heads + (token + new) * strides.heads
        own += (NUM_KV_HEADS * HEADS_PER_KV + kv_head) * DIM
        key, other_key = load_heads(own, is_new, partner, ROTARY_HALF, DIM, DIM_PADDED)
        own = layer.new_values + (token + new) * strides.heads + kv_head * VALUE_DIM
        is_element = is_new[:, None] & (value_dims < VALUE_DIM)[None, :]
        value = tl.load(own[:, None] + value_dims[None, :], mask=is_element, other=0.0)
        value = value.to(tl.float32)
    else:
        # An earlier layer has written them.
        new_key = tl.load(key_ptr + key_place, mask=is_key, other=0.0)
        new_value = tl.load(value_ptr + value_place, mask=is_value, other=0.0)
    cos, sin = load_angles(
        cos_ptr, sin_ptr, strides.cos, strides.sin, new, is_new, pair, is_second, ROTARY_HALF,
        DIM_PADDED,
    )  # fmt: skip
    of_rows = angles_of_rows(
        cos, sin, cos_ptr, sin_ptr, strides.cos, strides.sin, rows, is_row, pair, is_second,
        ROTARY_HALF, HEADS_PER_KV, DIM_PADDED, MAX_TOKENS,
    )  # fmt: skip
    ask_ahead(ahead)  # before, memory is reading for the launch before
    width: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV * DIM
    first = layer.heads + token * strides.heads
    query_scale = scale_of_all_heads(
        first, strides.heads, query_len, rows // HEADS_PER_KV, numbers.eps, width, NORM_TOKENS
    )
    query = rotated(
        query, other_query, *query_weights, *query_biases, query_scale, *of_rows, numbers.eps,
        dtype, ROTARY_HALF, NORM, ROUNDS_ONCE, CENTERING, DIM,
    )  # fmt: skip
    if growth is not None:
        query *= query_factor(position + rows // HEADS_PER_KV, growth)[:, None]
    query = query.to(dtype)
    is_first = part.split == 0
    if HAS_KEYS:
        key_scale = scale_of_all_heads(
            first + width, strides.heads, query_len, new, numbers.eps, NUM_KV_HEADS * DIM,
            NORM_TOKENS,
        )  # fmt: skip
        key = rotated(
            key, other_key, *key_weights, *key_biases, key_scale, cos, sin, numbers.eps, dtype,
            ROTARY_HALF, NORM, ROUNDS_ONCE, CENTERING, DIM,
        )  # fmt: skip
        cache_dtype: tl.constexpr = layer.key_cache.dtype.element_ty
        new_key = stored(key, dtype, cache_dtype)
        value = normed_value(value, numbers.eps, HAS_VALUE_NORM, VALUE_DIM)
        new_value = stored(value, dtype, cache_dtype)
        tl.store(key_ptr + key_place, new_key, mask=is_key & is_first)
        tl.store(value_ptr + value_place, new_value, mask=is_value & is_first)

    sums = tl.zeros((BLOCK_M, VALUE_PADDED), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        # A sink is one more key of the first part, whose value is zero.
        heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
        sinks = tl.load(layer.sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(is_first, sinks, float("-inf"))
        total = tl.where(is_first, 1.0, total)
    positions = position + rows // HEADS_PER_KV
    first_keys = first_visible(positions, window) if HAS_WINDOW else positions
    if HAS_FIRST:
        sums, peak, total = attend_to_tile(
            sums, peak, total, query, first_key, first_value, tile_keys, first_keys, positions,
            part.keys_begin, position, numbers.scale, numbers.cap, True, HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
        lowest += 1
    sums, peak, total = attend_tiles(
        sums, peak, total, query, first_keys, positions, lowest, part.highest, part.keys_begin,
        position, key_ptr, value_ptr, table_ptr, strides.block, strides.token, numbers.scale,
        numbers.cap, True, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, TILE, DIM, DIM_PADDED, VALUE_DIM,
        VALUE_PADDED,
    )  # fmt: skip
    output = OutputRows(
        layer.out + token * strides.out + kv_head * (HEADS_PER_KV * VALUE_DIM),
        places_of(rows, strides.out, HEADS_PER_KV, VALUE_DIM, MAX_TOKENS),
        gates_of(part, gates, rows, HEADS_PER_KV, VALUE_DIM, MAX_TOKENS),
    )
    own_gates = None
    if NUM_SPLITS == 1:  # they arrive while the new keys are attended to
        own_gates = load_gates(output.gates, is_row, VALUE_DIM, VALUE_PADDED)
    num_seen = tl.where(is_first & SEES_NEW, query_len, 0)
    multiplied: tl.constexpr = 1 if NEW_KEYS == 1 else BLOCK_M
    new_key = from_cache(new_key, dtype, multiplied)
    new_value = from_cache(new_value, dtype, multiplied)
    sums, peak, total = attend_to_new(
        sums, peak, total, query, new_key, new_value, position, first_keys, positions, num_seen,
        numbers.scale, numbers.cap, HAS_WINDOW, HAS_CAP, NEW_KEYS,
    )  # fmt: skip

    if NUM_SPLITS == 1:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        store_rows(output, result, own_gates, is_row, VALUE_DIM, VALUE_PADDED)
    else:
        # A request has the scratch memory of its tokens: the parts of a kv head, then of the next.
        num_rows = query_len * HEADS_PER_KV
        first_part = (token * NUM_KV_HEADS + kv_head * query_len) * (NUM_SPLITS * HEADS_PER_KV)
        counter = memory.counters + part.request * NUM_KV_HEADS + kv_head
        finish_part(
            output, sums, peak, total, rows, is_row, memory.sums, memory.stats, counter, first_part,
            part.split, part.num_parts, num_rows,
            NUM_SPLITS, HEADS_PER_KV, MAX_TOKENS, HEADS_AT_ONCE, VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def attend_decodes(
    layer,
    step,
    memory,
    numbers,
    window,
    strides,
    gates,
    growth,
    ahead,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    CENTERING: tl.constexpr,
    HAS_OWN_NORMS: tl.constexpr,
    NORM_TOKENS: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    NEW_KEYS: tl.constexpr,
    FEWEST_KEYS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    SEES_NEW: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
    request, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    part = part_of(
        step, request, kv_head, tl.program_id(1), window,
        HAS_WINDOW, NUM_SPLITS, FEWEST_KEYS, TILE, MAX_TOKENS, SEES_NEW,
    )  # fmt: skip
    if part.is_idle:
        if IS_DEPENDENT:
            gdc_wait()
        ask_ahead(ahead)
        return
    attend_part(
        part, layer, strides, numbers, window, memory, gates, growth, ahead, None,
        HAS_WINDOW, HAS_CAP, HAS_SINKS, ROTARY_HALF, IS_INTERLEAVED, NORM, ROUNDS_ONCE,
        CENTERING, HAS_OWN_NORMS, NORM_TOKENS, HAS_VALUE_NORM, NUM_SPLITS, NUM_KV_HEADS,
        HEADS_PER_KV, BLOCK_SIZE, BLOCK_M,
        TILE, DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, MAX_TOKENS, NEW_KEYS, HEADS_AT_ONCE,
        HAS_KEYS, LOADS_FIRST, IS_DEPENDENT, SEES_NEW,
    )  # fmt: skip
