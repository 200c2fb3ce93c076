"""One group of rows of queries meets one stretch of keys and values: scores, weights, sums.

Groups of every size do the same to each row, in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

from shmllm_kernels.cpu.attention_tiles import SCORES_STRIDE, outputs, scores, widest
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.softmax import weigh

LONGEST_GROUP = 6
SCORES_BYTES = LONGEST_GROUP * SCORES_STRIDE
FACTORS_BYTES = 64


class Rows(NamedTuple):
    """Rows of queries, and what is known of them so far. Addresses, but for the first two."""

    first_position: int  # of the tile's first query
    row: int  # in the tile
    query: int  # float32 [head_dim, rows], multiplied by scale and log2(e)
    out: int  # float32 [rows, padded]
    totals: int  # float32 [rows, LANES]
    greatest: int  # float32 [rows]
    scores: int  # SCORES_BYTES to work with
    factors: int  # FACTORS_BYTES to work with


class Stretch(NamedTuple):
    """Keys and values. Strides in bytes."""

    keys: int  # addresses of vectors of keys
    values: int
    first_key: int  # position
    end_key: int
    keys_per_vector: int
    dimension_stride: int
    value_stride: int
    key_bytes: int  # from keys to values
    head_dim: int
    padded: int  # head_dim
    heads_per_kv: int
    window: int  # 0: sees all


@compiled
def _first_seen(position, window):
    """By the token at a position."""
    return max(position - window + 1, 0) if window > 0 else 0


def _scoring(num_rows: int):
    wide = widest(num_rows)
    half = max(wide // 2, 2)
    score_wide, score_half = scores(num_rows, wide), scores(num_rows, half)
    score_two = scores(num_rows, 2)

    @compiled
    def score(rows, stretch, first, end, kind):
        """Scores of the vectors from `first` to `end`, and perhaps of some beside them."""
        vector = first // wide * wide
        stride, dim, behind = stretch.dimension_stride, stretch.head_dim, stretch.key_bytes
        while vector < end:
            keys, out = stretch.keys + 8 * vector, rows.scores + 4 * LANES * vector
            if end - vector > half:
                score_wide(rows.query, keys, stride, dim, out, behind, kind)
                vector += wide
            elif end - vector > 2:
                score_half(rows.query, keys, stride, dim, out, behind, kind)
                vector += half
            else:
                score_two(rows.query, keys, stride, dim, out, behind, kind)
                vector += 2

    return score


def _weighing(num_rows: int):
    @compiled
    def weigh_rows(rows, stretch, first, end):
        key = stretch.first_key + first * stretch.keys_per_vector
        factors = floats(rows.factors)
        for i in range(num_rows):
            position = rows.first_position + (rows.row + i) // stretch.heads_per_kv
            seen_from = _first_seen(position, stretch.window)
            factors[i] = weigh(
                rows.scores + i * SCORES_STRIDE + 4 * LANES * first, end - first,
                stretch.keys_per_vector, key - seen_from, position - seen_from + 1,
                rows.greatest + 4 * i, rows.totals + 4 * LANES * i,
            )  # fmt: skip

    return weigh_rows


def _adding(num_rows: int):
    columns = min(widest(num_rows), 4)
    add_columns, add_column = outputs(num_rows, columns), outputs(num_rows, 1)

    @compiled
    def add(rows, stretch, first, end, first_key, end_key, kind):
        """Add the values of keys from `first_key` to `end_key`, which those vectors have."""
        whole, stride = stretch.keys_per_vector, stretch.value_stride
        key = stretch.first_key + first * whole
        begin, last = first_key - key, end_key - key - (end - first - 1) * whole
        weights, values = rows.scores + 4 * LANES * first, stretch.values + 8 * first
        vectors = stretch.padded // LANES
        vector = 0
        while vector < vectors:
            skip, out = vector * (stride // vectors), rows.out + 4 * LANES * vector
            if vector + columns <= vectors:
                add_columns(
                    weights, values, skip, end - first, begin, last, whole, stride, rows.factors,
                    out, 4 * stretch.padded, -stretch.key_bytes, kind,
                )  # fmt: skip
                vector += columns
            else:
                add_column(
                    weights, values, skip, end - first, begin, last, whole, stride, rows.factors,
                    out, 4 * stretch.padded, -stretch.key_bytes, kind,
                )  # fmt: skip
                vector += 1

    return add


def _group(num_rows: int):
    """
    see(rows, stretch, kind)

    That many rows see what they may of a stretch of keys.
    """
    score, weigh_rows, add = _scoring(num_rows), _weighing(num_rows), _adding(num_rows)

    @compiled
    def see(rows, stretch, kind):
        first_position = rows.first_position + rows.row // stretch.heads_per_kv
        last_position = rows.first_position + (rows.row + num_rows - 1) // stretch.heads_per_kv
        first_key = max(_first_seen(first_position, stretch.window), stretch.first_key)
        end_key = min(last_position + 1, stretch.end_key)
        if first_key >= end_key:
            return
        whole = stretch.keys_per_vector
        first = (first_key - stretch.first_key) // whole
        end = (end_key - 1 - stretch.first_key) // whole + 1
        score(rows, stretch, first, end, kind)
        weigh_rows(rows, stretch, first, end)
        add(rows, stretch, first, end, first_key, end_key, kind)

    return see


GROUPS = {num_rows: _group(num_rows) for num_rows in (1, 2, 3, 4, LONGEST_GROUP)}
