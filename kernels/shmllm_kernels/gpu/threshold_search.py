"""Searches the thresholds of the rows that have too many candidates for a list.

A search narrows an interval of float32 values that contains the threshold. The programs of a launch
add the entries in the interval to a table of 2,048 bins of equal width, and the next launch takes
the bin with the threshold for its interval. Three tables of 11 bits separate all 2**32 values.
top_k counts the entries. top_p, whose search begins when that of top_k has ended, adds up their
weights, in units of 2**-40 of the largest weight: sums of whole numbers do not depend on the order
in which the device adds them, nor on how a row is divided among programs.

The search begins in `collect_candidates`, whose counts at 16 distances give the first interval.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.chunk_summaries import row_peak

BINS = tl.constexpr(2048)
BIN_BITS = tl.constexpr(11)
NUM_LEVELS = 3
"""The number of tables of one search."""
NUM_TABLES = 3
"""A launch reads the table of the one before, fills another, and clears that of the next one."""
TABLE_SIZE = tl.constexpr(2048 + 2)
"""The bins, the amount above the interval, and the amount of all entries that may be kept."""
STATE_SIZE = tl.constexpr(8)

COUNTS, WEIGHS, ENDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The phases of a row: the search of top_k, then that of top_p, then none."""
ALL_TIES = tl.constexpr(2**31 - 1)
KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


@triton.jit
def key_of(values):
    """Returns the indices (int64) of numbers in the order of all float32. Both zeros have one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def float_of_key(keys):
    """Returns the float32 numbers with these indices (int64)."""
    bits = tl.minimum(keys, 2147483647).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, peak):
    """Returns the weights of entries (int64): at most 2**40 each, so 2**22 of them fit."""
    return (tl.exp(values - peak) * 1099511627776.0).to(tl.int64)


@triton.jit
def _shift_of(size):
    """Returns the smallest shift such that the bins of width 1 << shift cover `size` keys."""
    widths = tl.full((32,), BINS, tl.int64) << tl.arange(0, 32).to(tl.int64)
    return tl.sum((size > widths).to(tl.int64), axis=0)


@triton.jit
def _floor_key(peak, min_p):
    """Returns the key of the smallest number that min_p keeps, but no infinite one."""
    floor = key_of(peak + tl.log(tl.maximum(min_p, 1e-37)))
    return tl.where(min_p > 0.0, floor, tl.full((), KEY_OF_MINUS_INFINITY + 1, tl.int64))


@triton.jit
def begin_search(counted, mass, distance, peak, top_k, top_p, min_p, vocab_size):
    """Returns the state of a row before its first table.

    Args:
        counted: the number of entries within each distance of the row's maximum.
        mass: the sums of their weights, in float32: the intervals allow for errors of 0.1 %.
        distance: the distances, growing.

    Returns:
        The phase, the interval's first key and shift, the smallest key that may be kept, and the
        interval that top_p would search if top_k kept everything.
    """
    pivots = key_of(peak - distance)
    smallest = tl.full((), KEY_OF_MINUS_INFINITY + 1, tl.int64)
    largest = key_of(peak) + 1
    cuts = (top_k > 0) & (top_k < vocab_size)
    reaches = counted >= top_k
    first = tl.max(tl.where(reaches, pivots, smallest), axis=0)
    end = tl.min(tl.where(reaches, largest, pivots), axis=0)

    floor_distance = tl.where(min_p > 0.0, -tl.log(tl.maximum(min_p, 1e-37)), float("inf"))
    holds_all_kept = (cuts & reaches) | (distance > floor_distance + 0.001)
    is_all_kept = (~cuts | (counted <= top_k)) & (distance <= floor_distance - 0.001)
    most = tl.min(tl.where(holds_all_kept, mass, tl.max(mass, axis=0)), axis=0)
    least = tl.max(tl.where(is_all_kept, mass, 0.0), axis=0)
    is_enough = mass >= 1.001 * top_p * most
    weighed_first = tl.max(tl.where(is_enough, pivots, smallest), axis=0)
    is_less = mass < 0.999 * top_p * least
    weighed_end = tl.min(tl.where(is_less, pivots, largest), axis=0)

    bottom = tl.where(cuts, smallest, _floor_key(peak, min_p))
    phase = tl.where(cuts, COUNTS, tl.where(top_p < 1.0, WEIGHS, ENDED)).to(tl.int64)
    first = tl.where(cuts, first, tl.where(top_p < 1.0, tl.maximum(weighed_first, bottom), bottom))
    end = tl.maximum(tl.where(cuts, end, weighed_end), first + 1)
    return phase, first, _shift_of(end - first), bottom, weighed_first, weighed_end


@triton.jit
def store_state(state_ptr, phase, first, shift, bottom, num_ties, weighed_first, weighed_end):
    tl.store(state_ptr, phase)
    tl.store(state_ptr + 1, first)
    tl.store(state_ptr + 2, shift)
    tl.store(state_ptr + 3, bottom)
    tl.store(state_ptr + 4, num_ties)
    tl.store(state_ptr + 5, weighed_first)
    tl.store(state_ptr + 6, weighed_end)


@triton.jit
def next_state(state_ptr, table_ptr, peak, top_k, top_p, min_p):
    """Returns the state of a row after a table was filled.

    Returns:
        The phase, the interval's first key and shift, the smallest key that may be kept, and the
        number of entries that are kept among those equal to the threshold. When the search has
        ended, the first key is the threshold's.
    """
    phase = tl.load(state_ptr)
    first = tl.load(state_ptr + 1)
    shift = tl.load(state_ptr + 2)
    bottom = tl.load(state_ptr + 3)
    num_ties = tl.load(state_ptr + 4)
    if phase != ENDED:
        bins = tl.arange(0, BINS)
        amounts = tl.load(table_ptr + bins)
        above = tl.load(table_ptr + BINS)
        total = tl.load(table_ptr + BINS + 1)
        parts = (top_p * 16777216.0).to(tl.int64)
        share = (total >> 24) * parts + (((total & 16777215) * parts) >> 24)
        target = tl.where(phase == COUNTS, tl.minimum(top_k.to(tl.int64), total), share)
        target = tl.maximum(target, 1)
        # The amounts at or above the lower bound of each bin: they fall from bin to bin.
        found = above + tl.sum(amounts, axis=0) - tl.cumsum(amounts, axis=0) + amounts
        chosen = tl.maximum(tl.sum((found >= target).to(tl.int64), axis=0) - 1, 0)
        larger = above + tl.sum(tl.where(bins > chosen, amounts, 0), axis=0)
        first += chosen << shift
        if shift > 0:
            shift = tl.maximum(shift - BIN_BITS, 0)
        elif (phase == COUNTS) & (top_p < 1.0):
            phase = tl.full((), WEIGHS, tl.int64)
            bottom = tl.maximum(first, _floor_key(peak, min_p))
            first = tl.maximum(bottom, tl.load(state_ptr + 5))
            shift = _shift_of(tl.maximum(tl.load(state_ptr + 6) - first, 1))
        elif phase == COUNTS:
            phase = tl.full((), ENDED, tl.int64)
            first = tl.maximum(first, _floor_key(peak, min_p))
        else:
            phase = tl.full((), ENDED, tl.int64)
            weight = tl.maximum(_weights(float_of_key(first), peak), 1)
            num_ties = tl.minimum((target - larger + weight - 1) // weight, ALL_TIES)
    return phase, first, shift, bottom, num_ties


@triton.jit
def fill_table(
    table_ptr,
    values_ptr,
    program,
    num_programs,
    peak,
    phase,
    first,
    shift,
    bottom,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Adds a program's part of a row to a table that was cleared."""
    end = first + (tl.full((), BINS, tl.int64) << shift)
    above = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(program * BLOCK, vocab_size, num_programs * BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        keys = key_of(values)
        may_be_kept = (keys >= bottom) & (values <= peak)  # false for NaN
        amounts = tl.where(phase == COUNTS, tl.full((BLOCK,), 1, tl.int64), _weights(values, peak))
        amounts = tl.where(may_be_kept, amounts, 0)
        total += amounts
        above += tl.where(keys >= end, amounts, 0)
        is_inside = may_be_kept & (keys >= first) & (keys < end)
        bins = table_ptr + ((keys - first) >> shift)
        tl.atomic_add(bins, amounts, mask=is_inside, sem="relaxed")
    tl.atomic_add(table_ptr + BINS, tl.sum(above, axis=0), sem="relaxed")
    tl.atomic_add(table_ptr + BINS + 1, tl.sum(total, axis=0), sem="relaxed")


@triton.jit
def clear_table(table_ptr, program, num_programs, BLOCK: tl.constexpr):
    """Clears a program's part of a table, for the next launch."""
    for begin in range(program * BLOCK, TABLE_SIZE, num_programs * BLOCK):
        places = begin + tl.arange(0, BLOCK)
        tl.store(table_ptr + places, tl.zeros((BLOCK,), tl.int64), mask=places < TABLE_SIZE)


@triton.jit
def narrow_interval(
    values_ptr,
    chunk_max_ptr,
    num_candidates_ptr,
    last_table_ptr,
    table_ptr,
    next_table_ptr,
    last_state_ptr,
    state_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    values_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Takes a row's next interval from the last table, and adds a part of the row to the next
    one."""
    index = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    num_programs = tl.num_programs(1)
    if tl.load(num_candidates_ptr + index) >= 0:
        return
    row = tl.load(rows_ptr + index)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    peak = row_peak(chunk_max_ptr + index * num_chunks, num_chunks, CHUNKS)
    last_state_ptr += index * STATE_SIZE
    phase, first, shift, bottom, num_ties = next_state(
        last_state_ptr, last_table_ptr + index * TABLE_SIZE, peak, top_k, top_p, min_p
    )
    if program == 0:
        weighed_first, weighed_end = tl.load(last_state_ptr + 5), tl.load(last_state_ptr + 6)
        store_state(
            state_ptr + index * STATE_SIZE,
            phase, first, shift, bottom, num_ties, weighed_first, weighed_end,
        )  # fmt: skip
    if phase != ENDED:
        clear_table(next_table_ptr + index * TABLE_SIZE, program, num_programs, BLOCK)
        table_ptr += index * TABLE_SIZE
        values_ptr += index * values_stride
        fill_table(
            table_ptr, values_ptr, program, num_programs, peak, phase, first, shift, bottom,
            vocab_size, BLOCK,
        )  # fmt: skip
