"""What attention knows about some query rows after a part of their keys, and how parts are merged.

The context of a token is attended to in splits of SPLIT_KEYS positions. The states of splits are
merged in ascending order, whether one piece of work visited all of them or each had its own: the
bits are the same. A state without keys changes no bit of the one that it is merged with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, number
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.softmax import INITIAL_MAX_SCORE, merge_factor, total_weight

SPLIT_KEYS = 1024
"""The number of positions in a split; a multiple of every chunk of keys."""
LOG2_E = 1.4426950408889634


class State(NamedTuple):
    """The addresses of a state of some rows."""

    out: int  # [rows, padded value_dim] float32: sums of weighted values
    weight_sums: int  # [rows, LANES] float32
    max_scores: int  # [rows] float32


@compiled
def cache_lines(num_bytes):
    """Rounds a size up to whole cache lines."""
    return (num_bytes + 63) // 64 * 64


@compiled
def state_bytes(rows, padded):
    """Returns the size of a state."""
    return cache_lines(4 * rows * padded) + cache_lines(4 * rows * LANES) + cache_lines(4 * rows)


@compiled
def state_at(address, rows, padded):
    """Returns the state at an address."""
    weight_sums = address + cache_lines(4 * rows * padded)
    return State(address, weight_sums, weight_sums + cache_lines(4 * rows * LANES))


@compiled
def _fill(address, count, value):
    values = floats(address)
    for i in range(count):
        values[i] = np.float32(value)


@compiled
def clear(state, rows, padded):
    """Makes it the state without keys."""
    _fill(state.out, rows * padded, 0.0)
    _fill(state.weight_sums, rows * LANES, 0.0)
    _fill(state.max_scores, rows, INITIAL_MAX_SCORE)


@compiled
def _add_scaled(target, source, count, factor, source_factor):
    values, others = floats(target), floats(source)
    for i in range(count):
        values[i] = values[i] * factor + others[i] * source_factor


@compiled
def merge(total, state, rows, padded):
    """Adds the state of the keys that follow to `total`."""
    maxima, others = floats(total.max_scores), floats(state.max_scores)
    for row in range(rows):
        largest = max(maxima[row], others[row])
        factor = merge_factor(maxima[row], largest)
        other = merge_factor(others[row], largest)
        maxima[row] = largest
        at = 4 * row * padded
        _add_scaled(total.out + at, state.out + at, padded, factor, other)
        at = 4 * row * LANES
        _add_scaled(total.weight_sums + at, state.weight_sums + at, LANES, factor, other)


@compiled
def store_output(state, rows, padded, value_dim, per_kv, first_head, sinks, kind, out, out_stride):
    """Writes the sums of weighted values, divided by the sums of weights.

    Args:
        state: the state of the rows, which belong to one key-value head.
        rows, padded, value_dim: the sizes.
        per_kv: the number of query heads of each token.
        first_head: the first of them.
        sinks: the address of weights [num_heads] of dtype `kind`, each the score of a key without
            a value; or 0.
        out, out_stride: the first token's row, and the bytes from one token to the next.
    """
    maxima = floats(state.max_scores)
    for row in range(rows):
        total = total_weight(state.weight_sums + 4 * row * LANES)
        factor, head = np.float32(1.0), first_head + row % per_kv
        if sinks != 0:
            sink = number(sinks, head, kind) * np.float32(LOG2_E)
            largest = max(maxima[row], sink)
            factor = merge_factor(maxima[row], largest)
            total = total * factor + merge_factor(sink, largest)
        share = factor / total
        target = floats(out + row // per_kv * out_stride + 4 * head * value_dim)
        summed = floats(state.out + 4 * row * padded)
        for j in range(value_dim):
            target[j] = summed[j] * share + np.float32(0.0)  # adding 0 turns -0 into 0
