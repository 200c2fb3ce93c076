"""Applies masks, penalties and temperature to the logits, and reduces each chunk of a row.

For rows without filters, greedy or not, this finds the best entry of each chunk; `token_choice`
then takes the best of these. Of rows with filters it writes the processed logits to memory, and the
largest entry of each chunk with the sum of all of its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.noise import gumbel_of_range


@triton.jit
def _penalised(values, token_counts, repetition, frequency, presence):
    """Applies the penalties as `reference.sampling.penalise`: repetition, frequency, presence."""
    repeated = tl.where(values > 0.0, values / repetition, values * repetition)
    values = tl.where(token_counts > 0, repeated, values)
    times = token_counts >> 1
    values = values - frequency * times.to(tl.float32)
    return values - tl.where(times > 0, presence, 0.0)


@triton.jit
def _load_counts(
    token_counts_ptr, columns, inside, draft_ptr, num_drafted_ptr, HAS_DRAFTS: tl.constexpr
):
    """Returns how often a row uses each token, with the drafted ones: the last of these is at
    ``draft_ptr``, the others before it."""
    token_counts = tl.load(token_counts_ptr + columns, mask=inside, other=0)
    if HAS_DRAFTS:
        for place in range(tl.load(num_drafted_ptr)):
            token_counts += tl.where(columns == tl.load(draft_ptr - place), 2, 0)
    return token_counts


@triton.jit
def summarise(values):
    """Returns the largest of a chunk's values, and the sum of exp(value - largest)."""
    peak = tl.max(values, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(tl.exp(values - base), axis=0)


@triton.jit
def first_of_largest(values, ids, none):
    """Returns the largest value and the lowest id that has it, or `none` if the value is NaN."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, none), axis=0)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, vocab_size):
    """Returns whether a row is not greedy and has a filter."""
    cuts = (top_k > 0) & (top_k < vocab_size)
    return (temperature > 0.0) & (cuts | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
    """Returns top_k, top_p and min_p of a row, and whether it is not greedy and has a filter."""
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_filter = is_filtered(tl.load(temperature_ptr + row), top_k, top_p, min_p, vocab_size)
    return top_k, top_p, min_p, has_filter


@triton.jit
def row_peak(chunk_max_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Returns the largest entry of a row, from those of its chunks."""
    chunks = tl.arange(0, CHUNKS)
    peaks = tl.load(chunk_max_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))
    return tl.max(peaks, axis=0)


@triton.jit
def row_total(chunk_max_ptr, chunk_sum_ptr, peak, num_chunks, CHUNKS: tl.constexpr):
    """Returns the sum of exp(entry - peak) over a row, from the maxima and sums of its chunks."""
    chunks = tl.arange(0, CHUNKS)
    present = chunks < num_chunks
    peaks = tl.load(chunk_max_ptr + chunks, mask=present, other=float("-inf"))
    sums = tl.load(chunk_sum_ptr + chunks, mask=present, other=0.0)
    return tl.sum(tl.where(sums > 0.0, sums * tl.exp(peaks - peak), 0.0), axis=0)


@triton.jit
def summarise_chunks(
    logits_ptr,
    processed_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_best_ptr,
    chunk_id_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    token_counts_ptr,
    drafts_ptr,
    num_drafted_ptr,
    mask_ptr,
    mask_rows_ptr,
    logits_stride,
    processed_stride,
    token_counts_stride,
    mask_stride,
    vocab_size,
    num_chunks,
    HAS_COUNTS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocab_size
    places = logits_ptr + index * logits_stride + columns
    # What depends on the row follows its number, 0.6 us later; the entries arrive meanwhile.
    loaded = tl.load(places, mask=inside, other=float("-inf"))
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    values = loaded.to(tl.float32)
    if HAS_MASK:
        mask_row = tl.load(mask_rows_ptr + index).to(tl.int64)
        if mask_row >= 0:
            words = mask_ptr + mask_row * mask_stride + columns // 32
            bits = tl.load(words, mask=inside, other=0)
            values = tl.where(((bits >> (columns % 32)) & 1) != 0, values, float("-inf"))
    if HAS_COUNTS:
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            token_counts = _load_counts(
                token_counts_ptr + row * token_counts_stride,
                columns,
                inside,
                drafts_ptr + index,
                num_drafted_ptr + index,
                HAS_DRAFTS,
            )
            values = _penalised(values, token_counts, repetition, frequency, presence)
    if temperature > 0.0:
        values = values / temperature

    part = index * num_chunks + chunk
    has_filter = is_filtered(temperature, top_k, top_p, min_p, vocab_size)
    if KEEPS_ALL | has_filter:
        tl.store(processed_ptr + index * processed_stride + columns, values, mask=inside)
    if has_filter:
        peak, total = summarise(values)
        tl.store(chunk_max_ptr + part, peak)
        tl.store(chunk_sum_ptr + part, total)
        return
    if temperature > 0.0:
        position = tl.load(positions_ptr + index)
        seed = tl.load(seeds_ptr + row)
        noisy = values + gumbel_of_range(seed, position, chunk * CHUNK, CHUNK)
        best, best_id = first_of_largest(noisy, columns, vocab_size)
    else:
        best, best_id = first_of_largest(values, columns, vocab_size)
    tl.store(chunk_best_ptr + part, best)
    tl.store(chunk_id_ptr + part, best_id)
