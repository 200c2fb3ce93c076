"""The kernels of paged attention, which `attention` launches.

A program computes some tokens of one request and the query heads that share one kv head. It
iterates over tiles of keys with an online softmax. It finds its request by binary search in
``query_starts``. With several splits, each part of a context has its own program, which writes its
sums to scratch memory; `merge_splits` combines them.

The compiler keeps the loads of later tiles in flight: ``num_stages`` stages are ``(num_stages - 1)
// 2`` buffers for keys and values, because their addresses come from a load of the block table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.float8 import from_cache
from shmllm_kernels.gpu.functions import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_request(starts_ptr, tile, num_requests, BLOCK_Q: tl.constexpr):
    """Returns the last request whose first tile, starts[i] // BLOCK_Q + i, is at most `tile`."""
    low = tile * 0
    high = low + num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def first_visible(positions, window):
    """Returns the first keys that tokens at some positions attend to; `window` is a result of
    `windows.window_number`, but not 0."""
    size = tl.maximum(-window, 1)
    return tl.where(window < 0, positions // size * size, tl.maximum(positions - window + 1, 0))


@triton.jit
def load_tile(
    keys, keys_begin, keys_end, key_ptr, value_ptr, table_ptr, block_stride, token_stride,
    IS_MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns the keys [DIM_PADDED, TILE] and values [TILE, VALUE_PADDED] at some positions, as the
    cache has them."""
    dims, value_dims = tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_PADDED)
    if IS_MASKED:
        # Slots without a token are not read: they may contain NaN, and 0 times NaN is NaN.
        present = (keys >= keys_begin) & (keys < keys_end)
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0)
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
    slots = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * token_stride
    key_places = key_ptr + slots[None, :] + dims[:, None]
    value_places = value_ptr + slots[:, None] + value_dims[None, :]
    if IS_MASKED:
        wanted = present[None, :] & (dims < DIM)[:, None]
        key = tl.load(key_places, mask=wanted, other=0)
        wanted = present[:, None] & (value_dims < VALUE_DIM)[None, :]
        value = tl.load(value_places, mask=wanted, other=0)
    else:
        if DIM == DIM_PADDED:
            key = tl.load(key_places)
        else:
            key = tl.load(key_places, mask=(dims < DIM)[:, None], other=0)
        if VALUE_DIM == VALUE_PADDED:
            value = tl.load(value_places)
        else:
            value = tl.load(value_places, mask=(value_dims < VALUE_DIM)[None, :], other=0)
    return key, value


@triton.jit
def attend_to_tile(
    sums, peak, total, query, key, value, keys, first_keys, last_keys, keys_begin, keys_end, scale,
    cap, IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, biases=None,
):  # fmt: skip
    """Updates the online softmax of all rows with the keys of one tile, as the cache has them.
    biases: for each row where the bias of a key at position 0 is; None: there are none."""
    key = from_cache(key, query.dtype, query.shape[0])
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_CAP:
        scores = cap * tanh(scores)
    if biases is not None:
        present = (keys >= keys_begin) & (keys < keys_end)
        scores += tl.load(biases[:, None] + keys[None, :], mask=present[None, :], other=0) * LOG2_E
    if IS_MASKED:
        visible = ((keys >= keys_begin) & (keys < keys_end))[None, :]
        visible &= keys[None, :] <= last_keys[:, None]
        if HAS_WINDOW:
            visible &= keys[None, :] >= first_keys[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # In a row whose keys were all masked so far, subtract 0 from minus infinity.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if IS_MASKED else new_peak
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    value = from_cache(value, query.dtype, query.shape[0])
    sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
    return sums, new_peak, total


@triton.jit
def attend_tiles(
    sums, peak, total, query, first_keys, last_keys, first_tile, last_tile, keys_begin, keys_end,
    key_ptr, value_ptr, table_ptr, block_stride, token_stride, scale, cap,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, biases=None,
):  # fmt: skip
    """Updates the online softmax of all rows with the keys of some tiles. Without IS_MASKED every
    row attends to all these keys. A row's last key is at its own position, or behind it; its first
    one only counts with HAS_WINDOW."""
    for tile in range(first_tile, last_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        key, value = load_tile(
            keys, keys_begin, keys_end, key_ptr, value_ptr, table_ptr, block_stride, token_stride,
            IS_MASKED, BLOCK_SIZE, DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip
        sums, peak, total = attend_to_tile(
            sums, peak, total, query, key, value, keys, first_keys, last_keys, keys_begin, keys_end,
            scale, cap, IS_MASKED, HAS_WINDOW, HAS_CAP, biases,
        )  # fmt: skip
    return sums, peak, total


@triton.jit
def tiles_of_part(
    keys_begin, keys_end, IS_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr
):
    """Returns the first tile of keys of a program's part of a context, and the one behind it."""
    lowest = keys_begin // TILE
    highest = tl.cdiv(keys_end, TILE)
    if IS_SPLIT:
        # A part has 2 * BLOCK_M keys or more: its sums are not more bytes than its keys and values.
        fewest: tl.constexpr = max(2 * BLOCK_M // TILE, 1)
        per_split = tl.maximum(tl.cdiv(highest - lowest, tl.num_programs(1)), fewest)
        lowest = lowest + tl.program_id(1) * per_split
        highest = tl.minimum(lowest + per_split, highest)
    return lowest, highest


@triton.jit
def first_biases(tokens, positions, stride, num_heads, OF_TOKENS: tl.constexpr):
    """Returns where the biases of a key at position 0 are, behind those of the row's head."""
    if OF_TOKENS:
        return tokens.to(tl.int64) * (num_heads * stride)
    else:
        return stride // 2 - positions


@triton.jit(do_not_specialize=["num_requests", "window"])
def attend(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    part_sums_ptr,
    part_stats_ptr,
    sinks_ptr,
    ends_ptr,
    biases_ptr,
    num_requests,
    scale,
    cap,
    window,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    biases_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    BIASES_OF_TOKENS: tl.constexpr,
    MASKS_ALL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS_PER_KV
    # The last tile of a prompt has the most keys. It is launched first, for all heads, so that the
    # launch ends with short programs.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = index // NUM_KV_HEADS
    kv_head = index % NUM_KV_HEADS
    request = find_request(starts_ptr, tile, num_requests, BLOCK_Q)
    begin = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - begin
    first_query = (tile - begin // BLOCK_Q - request) * BLOCK_Q
    if first_query >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    of_request = first_query + rows // HEADS_PER_KV
    is_row = (of_request < query_len) & (rows < BLOCK_Q * HEADS_PER_KV)
    heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    tokens = (begin + of_request).to(tl.int64)
    dims = tl.arange(0, DIM_PADDED)
    places = tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
    is_query = is_row[:, None] & (dims < DIM)[None, :]
    query = tl.load(query_ptr + places + dims[None, :], mask=is_query, other=0.0)

    context = tl.load(contexts_ptr + request)
    positions = context - query_len + of_request
    first_position = context - query_len + first_query
    positions_end = tl.minimum(first_position + BLOCK_Q, context)
    keys_end = positions_end
    last_keys = positions
    if HAS_ENDS:
        ends = tl.load(ends_ptr + tokens, mask=is_row, other=0)
        keys_end = tl.max(ends, axis=0)
        last_keys = ends - 1
    if biases_ptr is not None:
        # Rows of no token read those of another one.
        biases_ptr += tl.where(is_row, heads, kv_head * HEADS_PER_KV) * biases_stride
        biases_ptr += first_biases(
            tl.where(is_row, tokens, begin + first_query),
            tl.where(is_row, positions, first_position),
            biases_stride, NUM_KV_HEADS * HEADS_PER_KV, BIASES_OF_TOKENS,
        )  # fmt: skip
    keys_begin = tile * 0
    first_keys = first_visible(positions, window) if HAS_WINDOW else positions
    if HAS_WINDOW:
        keys_begin = first_visible(first_position, window)
    lowest, highest = tiles_of_part(keys_begin, keys_end, IS_SPLIT, BLOCK_M, TILE)

    sums = tl.zeros((BLOCK_M, VALUE_PADDED), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        # A sink is one more key of the first part, whose value is zero.
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        is_first = tl.program_id(1) == 0
        peak = tl.where(is_first, sinks, float("-inf"))
        total = tl.where(is_first, 1.0, total)
    key_ptr += kv_head * kv_head_stride
    value_ptr += kv_head * kv_head_stride
    table_ptr += request.to(tl.int64) * table_stride
    to_tile = lowest
    # fmt: off
    if not MASKS_ALL:
        # From from_tile to to_tile every row attends to every key.
        from_tile = lowest
        if HAS_WINDOW:
            from_tile = tl.cdiv(first_visible(positions_end - 1, window), TILE)
            from_tile = tl.minimum(tl.maximum(from_tile, lowest), highest)
            sums, peak, total = attend_tiles(
                sums, peak, total, query, first_keys, last_keys, lowest, from_tile, keys_begin,
                keys_end, key_ptr, value_ptr, table_ptr, block_stride, token_stride, scale, cap,
                True, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, TILE, DIM, DIM_PADDED, VALUE_DIM,
                VALUE_PADDED, biases_ptr)
        common_end = first_position + 1
        if HAS_ENDS:
            common_end = tl.min(tl.where(is_row, ends, keys_end), axis=0)
        to_tile = tl.minimum(tl.maximum(common_end // TILE, from_tile), highest)
        sums, peak, total = attend_tiles(
            sums, peak, total, query, first_keys, last_keys, from_tile, to_tile, keys_begin,
            keys_end, key_ptr, value_ptr, table_ptr, block_stride, token_stride, scale, cap,
            False, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, TILE, DIM, DIM_PADDED, VALUE_DIM,
            VALUE_PADDED, biases_ptr)
    sums, peak, total = attend_tiles(
        sums, peak, total, query, first_keys, last_keys, to_tile, highest, keys_begin, keys_end,
        key_ptr, value_ptr, table_ptr, block_stride, token_stride, scale, cap,
        True, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, TILE, DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED,
        biases_ptr)
    # fmt: on

    value_dims = tl.arange(0, VALUE_PADDED)
    is_element = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if IS_SPLIT:
        row = tokens * (NUM_KV_HEADS * HEADS_PER_KV) + heads
        part = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(part_stats_ptr + 2 * part, peak, mask=is_row)
        tl.store(part_stats_ptr + 2 * part + 1, total, mask=is_row)
        part_places = part_sums_ptr + part[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(part_places, sums, mask=is_element & (total > 0.0)[:, None])
    else:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        places = tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride
        out_places = out_ptr + places + value_dims[None, :]
        tl.store(out_places, result.to(out_ptr.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_requests"])
def merge_splits(
    out_ptr,
    part_sums_ptr,
    part_stats_ptr,
    starts_ptr,
    num_requests,
    out_token_stride,
    out_head_stride,
    NUM_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(starts_ptr + num_requests):
        return
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, DIM_PADDED)
    parts = (token * tl.num_programs(1) + head) * NUM_SPLITS + splits
    peaks = tl.load(part_stats_ptr + 2 * parts)
    totals = tl.load(part_stats_ptr + 2 * parts + 1)
    # The program of a split without keys wrote no sums.
    written = (totals > 0.0)[:, None] & (dims < DIM)[None, :]
    sums = tl.load(part_sums_ptr + parts[:, None] * DIM + dims[None, :], mask=written, other=0.0)
    shares = tl.exp2(peaks - tl.max(peaks, axis=0))
    result = tl.sum(sums * shares[:, None], axis=0) / tl.sum(totals * shares, axis=0)
    places = out_ptr + token * out_token_stride + head * out_head_stride + dims
    tl.store(places, result.to(out_ptr.dtype.element_ty), mask=dims < DIM)
