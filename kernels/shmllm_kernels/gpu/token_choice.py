"""Chooses the token of each row: applies the filters, and takes the largest sum of value and noise.

The filters keep the entries above a threshold, and those equal to it up to some token id, since
top_p keeps only the first few of them. `choose_tokens` finds the threshold of a row with a list of
candidates: it begins with all 2**32 ordered float32 values and narrows them to a sixteenth, eight
times, with a count or a sum of weights at each bound; it sorts nothing. The other rows have the
threshold of a `threshold_search`: `draw_chunks` draws from each chunk, with and without its entries
equal to the threshold, and `choose_tokens` reads the one chunk of which only some are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.chunk_summaries import (
    first_of_largest,
    load_filters,
    row_peak,
    row_total,
)
from shmllm_kernels.gpu.noise import gumbel_of_entries, gumbel_of_range
from shmllm_kernels.gpu.threshold_search import (
    KEY_OF_MINUS_INFINITY,
    STATE_SIZE,
    TABLE_SIZE,
    float_of_key,
    key_of,
    next_state,
)


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
        found = _measure(values_ptr, length, float_of_key(keys), peak, BY_WEIGHT, BLOCK)
        # The first pivot reaches the target by construction.
        reached = tl.sum(((found >= target) & (tl.arange(0, 16) > 0)).to(tl.int64), axis=0)
        key += step * reached
        step = step // 16
    return tl.max(float_of_key(key), axis=0)


@triton.jit
def _last_equal(
    values_ptr, ids_ptr, begin, end, threshold, wanted, IS_LIST: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the token id of the `wanted`-th entry that equals the threshold, among those from
    begin to end; -1 for the 0th."""
    seen = 0
    found = -1
    for first in range(begin, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < end, other=float("nan"))
        ids = tl.load(ids_ptr + places, mask=places < end, other=0) if IS_LIST else places
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
    BLOCK: tl.constexpr,
):
    """Returns the threshold of min_p, top_k and top_p of a list, and the last token id that is
    kept among the entries equal to it."""
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
        following = float_of_key(key_of(threshold) + 1)
        above = _measure(
            values_ptr, length, tl.full((16,), 0.0, tl.float32) + following, peak, True, BLOCK
        )
        rest = (target - tl.max(above, axis=0)) / tl.exp(threshold - peak)
        wanted = tl.maximum(tl.ceil(tl.minimum(rest, 1e9)), 1.0).to(tl.int32)
        last_id = _last_equal(values_ptr, ids_ptr, 0, length, threshold, wanted, True, BLOCK)
    return threshold, last_id


@triton.jit
def _draw(
    values_ptr,
    ids_ptr,
    begin,
    end,
    threshold,
    last_id,
    seed,
    position,
    vocab_size,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the largest sum of value and noise among the kept entries from begin to end, and its
    token id."""
    best = float("-inf")
    best_id = 0
    for first in range(begin, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < end, other=float("-inf"))
        ids = tl.load(ids_ptr + places, mask=places < end, other=0) if IS_LIST else places
        kept = (values > threshold) | ((values == threshold) & (ids <= last_id))
        noisy = values + gumbel_of_entries(seed, position, ids)
        noisy = tl.where(kept & (values > float("-inf")), noisy, float("-inf"))
        largest, largest_id = first_of_largest(noisy, ids, vocab_size)
        is_better = largest > best
        best = tl.where(is_better, largest, best)
        best_id = tl.where(is_better, largest_id, best_id)
    return best, best_id


@triton.jit
def draw_chunks(
    values_ptr,
    chunk_max_ptr,
    chunk_best_ptr,
    chunk_id_ptr,
    tied_best_ptr,
    tied_id_ptr,
    num_tied_ptr,
    thresholds_ptr,
    kept_ties_ptr,
    num_candidates_ptr,
    table_ptr,
    state_ptr,
    rows_ptr,
    positions_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    values_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draws from the entries of each chunk above the threshold of a search, and from these and the
    entries equal to it; counts the latter."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(num_candidates_ptr + index) >= 0:
        return
    row = tl.load(rows_ptr + index)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    peak = row_peak(chunk_max_ptr + index * num_chunks, num_chunks, CHUNKS)
    state_ptr += index * STATE_SIZE
    table_ptr += index * TABLE_SIZE
    _, key, _, _, num_ties = next_state(state_ptr, table_ptr, peak, top_k, top_p, min_p)
    threshold = float_of_key(key)
    if tl.program_id(1) == 0:
        tl.store(thresholds_ptr + index, threshold)
        tl.store(kept_ties_ptr + index, num_ties.to(tl.int32))

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + index)
    values_ptr += index * values_stride
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(values_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        noisy = values + gumbel_of_range(seed, position, chunk * CHUNK, CHUNK)
        part = index * num_chunks + chunk
        above = tl.where(values > threshold, noisy, float("-inf"))
        best, best_id = first_of_largest(above, columns, vocab_size)
        tl.store(chunk_best_ptr + part, best)
        tl.store(chunk_id_ptr + part, best_id)
        is_tied = values == threshold
        best, best_id = first_of_largest(tl.where(is_tied, noisy, above), columns, vocab_size)
        tl.store(tied_best_ptr + part, best)
        tl.store(tied_id_ptr + part, best_id)
        tl.store(num_tied_ptr + part, tl.sum(is_tied.to(tl.int32), axis=0))


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
    tied_best_ptr,
    tied_id_ptr,
    num_tied_ptr,
    kept_ties_ptr,
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
    CHUNK: tl.constexpr,
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

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + index)
    length = tl.load(num_candidates_ptr + index)
    ids_ptr = candidate_ids_ptr + index * CAPACITY
    if length >= 0:
        chunk_max_ptr += index * num_chunks
        chunk_sum_ptr += index * num_chunks
        peak = row_peak(chunk_max_ptr, num_chunks, CHUNKS)
        total = row_total(chunk_max_ptr, chunk_sum_ptr, peak, num_chunks, CHUNKS)
        values = candidates_ptr + index * CAPACITY
        threshold, last_id = _find_bounds(
            values, ids_ptr, length, peak, total, top_k, top_p, min_p, vocab_size, BLOCK
        )
        _, token = _draw(
            values, ids_ptr, 0, length, threshold, last_id, seed, position, vocab_size, True, BLOCK
        )
    else:
        threshold = tl.load(thresholds_ptr + index)
        kept_ties = tl.load(kept_ties_ptr + index)
        num_tied = tl.load(num_tied_ptr + parts, mask=present, other=0)
        keeps_all = tl.cumsum(num_tied, axis=0) <= kept_ties
        with_ties = present & keeps_all
        without_ties = present & ~keeps_all
        bests = tl.load(chunk_best_ptr + parts, mask=without_ties, other=float("-inf"))
        ids = tl.load(chunk_id_ptr + parts, mask=without_ties, other=vocab_size)
        bests = tl.load(tied_best_ptr + parts, mask=with_ties, other=bests)
        ids = tl.load(tied_id_ptr + parts, mask=with_ties, other=ids)
        best, token = first_of_largest(bests, ids, vocab_size)
        last_id = vocab_size
        partial = tl.sum(with_ties.to(tl.int32), axis=0)
        if partial < num_chunks:
            values = processed_ptr + index * processed_stride
            begin = partial * CHUNK
            end = tl.minimum(begin + CHUNK, vocab_size)
            rest = kept_ties - tl.sum(tl.where(keeps_all, num_tied, 0), axis=0)
            last_id = _last_equal(values, ids_ptr, begin, end, threshold, rest, False, BLOCK)
            last_id = tl.maximum(last_id, begin - 1)
            own, own_id = _draw(
                values, ids_ptr, begin, end, threshold, last_id, seed, position, vocab_size,
                False, BLOCK,
            )  # fmt: skip
            is_better = (own > best) | ((own == best) & (own_id < token))
            token = tl.where(is_better, own_id, token)
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
