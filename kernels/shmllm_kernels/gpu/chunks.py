"""First look at the logits, by chunks of all rows: edits, and what each chunk sums up to.

Rows without filters are done here but for the best of their chunks: greedy ones, and those
that are drawn from all there is. Of the others what was computed goes to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.candidates import is_filtered
from shmllm_kernels.gpu.noise import gumbel_of_range


@triton.jit
def _penalised(values, uses, repetition, frequency, presence):
    """Repetition, then frequency, then presence, as `reference.sampling.penalise` has them."""
    repeated = tl.where(values > 0.0, values / repetition, values * repetition)
    values = tl.where(uses > 0, repeated, values)
    times = uses >> 1
    values = values - frequency * times.to(tl.float32)
    return values - tl.where(times > 0, presence, 0.0)


@triton.jit
def summarise(values):
    """The largest of a chunk's values, and the sum of their exponentials relative to it."""
    peak = tl.max(values, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(tl.exp(values - base), axis=0)


@triton.jit
def first_of_largest(values, ids, none):
    """The largest value and the lowest id that has it, `none` if it is NaN."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, none), axis=0)


@triton.jit
def look(
    logits_ptr,
    edited_ptr,
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
    uses_ptr,
    mask_ptr,
    mask_rows_ptr,
    logits_stride,
    edited_stride,
    uses_stride,
    mask_stride,
    vocab_size,
    num_chunks,
    HAS_USES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocab_size
    places = logits_ptr + index * logits_stride + columns
    values = tl.load(places, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_MASK:
        mask_row = tl.load(mask_rows_ptr + index).to(tl.int64)
        if mask_row >= 0:
            words = mask_ptr + mask_row * mask_stride + columns // 32
            bits = tl.load(words, mask=inside, other=0)
            values = tl.where(((bits >> (columns % 32)) & 1) != 0, values, float("-inf"))
    if HAS_USES:
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            uses = tl.load(uses_ptr + row * uses_stride + columns, mask=inside, other=0)
            values = _penalised(values, uses, repetition, frequency, presence)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        values = values / temperature

    part = index * num_chunks + chunk
    peak, total = summarise(values)
    tl.store(chunk_max_ptr + part, peak)
    tl.store(chunk_sum_ptr + part, total)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_filter = is_filtered(temperature, top_k, top_p, min_p, vocab_size)
    edited = edited_ptr + index * edited_stride + columns
    if KEEPS_ALL:
        tl.store(edited, values, mask=inside)
    if has_filter:
        tl.store(edited, values, mask=inside)
        return
    if temperature > 0.0:
        position = tl.load(positions_ptr + index)
        seed = tl.load(seeds_ptr + row)
        values += gumbel_of_range(seed, position, chunk * CHUNK, CHUNK)
    best, best_id = first_of_largest(values, columns, vocab_size)
    tl.store(chunk_best_ptr + part, best)
    tl.store(chunk_id_ptr + part, best_id)
