"""Lists the candidates of each row: the entries that its top_k, top_p and min_p may keep.

Sorting a whole row would take longer than all other work of a sampler. Instead each chunk of a row
counts its entries within 16 distances of the row's maximum. The smallest distance that certainly
includes all entries that the filters keep is chosen, and the entries within it are copied to a
list, in their order. A row with more than CAPACITY of them gets no list, and the first table of a
`threshold_search` instead.

The kernels run in parallel over the chunks of all rows and read each row twice. `token_choice` then
applies the filters to the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.chunk_summaries import load_filters, row_peak
from shmllm_kernels.gpu.threshold_search import (
    ALL_TIES,
    ENDED,
    STATE_SIZE,
    TABLE_SIZE,
    begin_search,
    clear_table,
    fill_table,
    store_state,
)

NUM_PIVOTS = 16
CAPACITY = 2048
"""The largest number of candidates in a list."""


@triton.jit
def distances(NUM_PIVOTS: tl.constexpr):
    """Returns the distances of the pivots from the row's maximum: 1/16, 3/32, ... up to 18 nats,
    each 1.5 times the previous one; the last one is infinite."""
    number = tl.arange(0, NUM_PIVOTS)
    growing = 0.0625 * tl.exp2(number.to(tl.float32) * 0.5849625007211562)
    return tl.where(number == NUM_PIVOTS - 1, float("inf"), growing)


@triton.jit
def count_by_distance(
    values_ptr,
    chunk_max_ptr,
    counts_ptr,
    masses_ptr,
    first_table_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    values_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Counts the entries of a chunk within each distance, and sums their weights. Clears the first
    table of a search."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row < 0:
        return
    _, _, _, has_filter = load_filters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size
    )
    if not has_filter:
        return
    peak = row_peak(chunk_max_ptr + index * num_chunks, num_chunks, CHUNKS)
    pivots = peak - distances(NUM_PIVOTS)
    clear_table(first_table_ptr + index * TABLE_SIZE, chunk, num_chunks, BLOCK)
    count = tl.zeros((NUM_PIVOTS, BLOCK), tl.int32)
    mass = tl.zeros((NUM_PIVOTS, BLOCK), tl.float32)
    for begin in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        places = values_ptr + index * values_stride + columns
        values = tl.load(places, mask=columns < vocab_size, other=float("-inf"))
        weights = tl.exp(values - peak)
        inside = (values[None, :] >= pivots[:, None]) & (values > float("-inf"))[None, :]
        count += inside.to(tl.int32)
        mass += tl.where(inside, weights[None, :], 0.0)
    target = (index * num_chunks + chunk) * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)
    tl.store(counts_ptr + target, tl.sum(count, axis=1))
    tl.store(masses_ptr + target, tl.sum(mass, axis=1))


@triton.jit
def _smallest_distance(
    counted, mass, distance, top_k, top_p, min_p, vocab_size, NUM_PIVOTS: tl.constexpr
):
    """Returns the number of the smallest distance that certainly includes all entries that the
    filters keep."""
    number = tl.arange(0, NUM_PIVOTS)
    total = tl.sum(tl.where(number == NUM_PIVOTS - 1, mass, 0.0), axis=0)
    # token_choice adds these weights in another order, so require a little more than top_p.
    is_enough = mass >= top_p * total * 1.001
    holds_floor = distance > 0.001 - tl.log(tl.maximum(min_p, 1e-37))
    if min_p > 0.0:
        is_enough = holds_floor
    if (top_k > 0) & (top_k < vocab_size):
        is_enough = counted >= top_k
        if min_p > 0.0:
            is_enough |= holds_floor
    return tl.min(tl.where(is_enough, number, NUM_PIVOTS - 1), axis=0)


@triton.jit
def collect_candidates(
    values_ptr,
    chunk_max_ptr,
    counts_ptr,
    masses_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    num_candidates_ptr,
    first_table_ptr,
    second_table_ptr,
    state_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    values_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Copies a chunk's candidates to the row's list, after those of the chunks before it, or adds
    a part of the row to the first table of a search.

    A row's num_candidates becomes the length of its list, 0 without filters, or -1 if it gets no
    list."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + index)
    top_k, top_p, min_p, has_filter = load_filters(
        tl.maximum(row, 0), temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size
    )
    if (row < 0) | ~has_filter:
        if chunk == 0:
            tl.store(num_candidates_ptr + index, 0)
        return
    number = tl.arange(0, NUM_PIVOTS)
    chunks = tl.arange(0, CHUNKS)
    parts = (index * num_chunks + chunks)[:, None] * NUM_PIVOTS + number[None, :]
    present = (chunks < num_chunks)[:, None]
    counts = tl.load(counts_ptr + parts, mask=present, other=0)
    masses = tl.load(masses_ptr + parts, mask=present, other=0.0)
    counted = tl.sum(counts, axis=0)
    mass = tl.sum(masses, axis=0)

    distance = distances(NUM_PIVOTS)
    chosen = _smallest_distance(
        counted, mass, distance, top_k, top_p, min_p, vocab_size, NUM_PIVOTS
    )
    length = tl.sum(tl.where(number == chosen, counted, 0), axis=0)
    if chunk == 0:
        tl.store(num_candidates_ptr + index, tl.where(length <= CAPACITY, length, -1))
    peak = row_peak(chunk_max_ptr + index * num_chunks, num_chunks, CHUNKS)
    values_ptr += index * values_stride
    if length > CAPACITY:
        phase, first, shift, bottom, weighed_first, weighed_end = begin_search(
            counted, mass, distance, peak, top_k, top_p, min_p, vocab_size
        )
        if chunk == 0:
            store_state(
                state_ptr + index * STATE_SIZE,
                phase, first, shift, bottom, ALL_TIES, weighed_first, weighed_end,
            )  # fmt: skip
        if phase != ENDED:
            clear_table(second_table_ptr + index * TABLE_SIZE, chunk, num_chunks, BLOCK)
            fill_table(
                first_table_ptr + index * TABLE_SIZE,
                values_ptr, chunk, num_chunks, peak, phase, first, shift, bottom, vocab_size,
                BLOCK,
            )  # fmt: skip
        return

    is_before = (chunks < chunk)[:, None] & (number == chosen)[None, :]
    taken = tl.sum(tl.sum(tl.where(is_before, counts, 0), axis=1), axis=0)
    pivot = peak - tl.sum(tl.where(number == chosen, distance, 0.0), axis=0)
    for begin in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        inside = (values >= pivot) & (values > float("-inf"))
        ordinal = tl.cumsum(inside.to(tl.int32), axis=0)
        target = index * CAPACITY + taken + ordinal - 1
        tl.store(candidates_ptr + target, values, mask=inside)
        tl.store(candidate_ids_ptr + target, columns, mask=inside)
        taken += tl.sum(inside.to(tl.int32), axis=0)
