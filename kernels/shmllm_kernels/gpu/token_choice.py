"""Finds the threshold of each row's filters and chooses the token.

The entries that the filters keep are those above a threshold. The search for it begins with all
2**32 ordered float32 values and narrows them to a sixteenth, eight times, with a count or a sum of
weights at each bound; it sorts nothing. Among entries equal to the threshold, top_p keeps the
first few: a row keeps its entries above the threshold, and those equal to it up to some token id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.chunk_summaries import first_of_largest
from shmllm_kernels.gpu.noise import gumbel_of_entries
from shmllm_kernels.gpu.top_candidates import load_filters, row_peak, row_total

KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


@triton.jit
def _float_of_key(keys):
    """Returns the float32 numbers whose index in the order of all float32 is `keys` (int64)."""
    bits = tl.minimum(keys, 2147483647).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _measure(values_ptr, length, pivots, peak, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the number of values at or above each of 16 pivots, or the sum of their weights."""
    found = tl.zeros((16, BLOCK), tl.float32)
    for begin in range(0, length, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < length, other=float("nan"))
        weights = tl.exp(values - peak) if BY_WEIGHT else tl.full((BLOCK,), 1.0, tl.float32)
        found += tl.where(values[None, :] >= pivots[:, None], weights[None, :], 0.0)
    return tl.sum(found, axis=1)


@triton.jit
def _find_threshold(values_ptr, length, peak, target, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest threshold such that the number or the weights of the values at or above
    it reach the target; minus infinity if there is none."""
    key = tl.full((1,), KEY_OF_MINUS_INFINITY, tl.int64)
    step = tl.full((1,), 1 << 28, tl.int64)
    for _ in range(8):
        keys = key + step * tl.arange(0, 16)
        found = _measure(values_ptr, length, _float_of_key(keys), peak, BY_WEIGHT, BLOCK)
        # The first pivot reaches the target by construction.
        reached = tl.sum(((found >= target) & (tl.arange(0, 16) > 0)).to(tl.int64), axis=0)
        key += step * reached
        step = step // 16
    return tl.max(_float_of_key(key), axis=0)


@triton.jit
def _last_equal(
    values_ptr, ids_ptr, length, threshold, wanted, IS_LIST: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the token id of the `wanted`-th entry that equals the threshold."""
    seen = 0
    found = -1
    for begin in range(0, length, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < length, other=float("nan"))
        ids = tl.load(ids_ptr + places, mask=places < length, other=0) if IS_LIST else places
        equal = (values == threshold).to(tl.int32)
        ordinal = seen + tl.cumsum(equal, axis=0)
        taken = (equal > 0) & (ordinal <= wanted)
        found = tl.maximum(found, tl.max(tl.where(taken, ids, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit
def _find_bounds(
    values_ptr,
    ids_ptr,
    length,
    peak,
    total,
    top_k,
    top_p,
    min_p,
    vocab_size,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the threshold of min_p, top_k and top_p, and the last token id that is kept among
    the entries equal to it."""
    threshold = float("-inf")
    cuts = (top_k > 0) & (top_k < vocab_size)
    if cuts:
        threshold = _find_threshold(values_ptr, length, peak, top_k.to(tl.float32), False, BLOCK)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, peak + tl.log(tl.maximum(min_p, 1e-37)))
    last_id = vocab_size
    if top_p < 1.0:
        if cuts | (min_p > 0.0):
            pivots = tl.full((16,), 0.0, tl.float32) + threshold
            sums = _measure(values_ptr, length, pivots, peak, True, BLOCK)
            total = tl.max(sums, axis=0)
        target = top_p * total
        threshold = _find_threshold(values_ptr, length, peak, target, True, BLOCK)
        following = _float_of_key(_key_after(threshold))
        above = _measure(
            values_ptr, length, tl.full((16,), 0.0, tl.float32) + following, peak, True, BLOCK
        )
        rest = (target - tl.max(above, axis=0)) / tl.exp(threshold - peak)
        wanted = tl.maximum(tl.ceil(tl.minimum(rest, 1e9)), 1.0).to(tl.int32)
        last_id = _last_equal(values_ptr, ids_ptr, length, threshold, wanted, IS_LIST, BLOCK)
    return threshold, last_id


@triton.jit
def _key_after(value):
    """Returns the index of the next larger float32. Zero comes after minus zero."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 1
    return keys


@triton.jit
def _draw(
    values_ptr,
    ids_ptr,
    length,
    threshold,
    last_id,
    seed,
    position,
    vocab_size,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the kept entry with the largest sum of value and noise."""
    best = float("-inf")
    best_id = 0
    for begin in range(0, length, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < length, other=float("-inf"))
        ids = tl.load(ids_ptr + places, mask=places < length, other=0) if IS_LIST else places
        kept = (values > threshold) | ((values == threshold) & (ids <= last_id))
        noisy = values + gumbel_of_entries(seed, position, ids)
        noisy = tl.where(kept & (values > float("-inf")), noisy, float("-inf"))
        largest, largest_id = first_of_largest(noisy, ids, vocab_size)
        is_better = largest > best
        best = tl.where(is_better, largest, best)
        best_id = tl.where(is_better, largest_id, best_id)
    return best_id


@triton.jit
def choose_tokens(
    tokens_ptr,
    last_tokens_ptr,
    processed_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_best_ptr,
    chunk_id_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    num_candidates_ptr,
    thresholds_ptr,
    last_ids_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    processed_stride,
    vocab_size,
    num_chunks,
    HAS_LAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    if row < 0:
        return
    chunks = tl.arange(0, CHUNKS)
    parts = index * num_chunks + chunks
    present = chunks < num_chunks
    top_k, top_p, min_p, has_filter = load_filters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size
    )
    if not has_filter:
        bests = tl.load(chunk_best_ptr + parts, mask=present, other=float("-inf"))
        ids = tl.load(chunk_id_ptr + parts, mask=present, other=vocab_size)
        _, token = first_of_largest(bests, ids, vocab_size)
        token = tl.where(token < vocab_size, token, 0).to(tl.int64)
        tl.store(tokens_ptr + index, token)
        if HAS_LAST:
            tl.store(last_tokens_ptr + row, token)
        tl.store(thresholds_ptr + index, float("-inf"))
        tl.store(last_ids_ptr + index, vocab_size)
        return

    chunk_max_ptr += index * num_chunks
    chunk_sum_ptr += index * num_chunks
    peak = row_peak(chunk_max_ptr, num_chunks, CHUNKS)
    total = row_total(chunk_max_ptr, chunk_sum_ptr, peak, num_chunks, CHUNKS)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + index)
    length = tl.load(num_candidates_ptr + index)
    # fmt: off
    if length >= 0:
        values = candidates_ptr + index * CAPACITY
        ids = candidate_ids_ptr + index * CAPACITY
        threshold, last_id = _find_bounds(
            values, ids, length, peak, total, top_k, top_p, min_p, vocab_size, True, BLOCK)
        token = _draw(
            values, ids, length, threshold, last_id, seed, position, vocab_size, True, BLOCK)
    else:
        values = processed_ptr + index * processed_stride
        ids = candidate_ids_ptr + index * CAPACITY
        threshold, last_id = _find_bounds(
            values, ids, vocab_size, peak, total, top_k, top_p, min_p, vocab_size, False, BLOCK)
        token = _draw(
            values, ids, vocab_size, threshold, last_id, seed, position, vocab_size, False, BLOCK)
    # fmt: on
    token = tl.where(token < vocab_size, token, 0).to(tl.int64)
    tl.store(tokens_ptr + index, token)
    if HAS_LAST:
        tl.store(last_tokens_ptr + row, token)
    tl.store(thresholds_ptr + index, threshold)
    tl.store(last_ids_ptr + index, last_id)


@triton.jit
def mask_dropped(
    processed_ptr,
    thresholds_ptr,
    last_ids_ptr,
    rows_ptr,
    processed_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """Writes minus infinity to the entries that a row's filters drop."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(rows_ptr + index) < 0:
        return
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    places = processed_ptr + index * processed_stride + columns
    values = tl.load(places, mask=columns < vocab_size, other=float("-inf"))
    threshold = tl.load(thresholds_ptr + index)
    last_id = tl.load(last_ids_ptr + index)
    kept = (values > threshold) | ((values == threshold) & (columns <= last_id))
    tl.store(places, float("-inf"), mask=(columns < vocab_size) & ~kept)
