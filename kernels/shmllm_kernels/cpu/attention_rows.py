"""Computes attention of one group of query rows over one chunk of keys and values.

Groups of all sizes apply the same operations to each row, in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

from shmllm_kernels.cpu.attention_tiles import (
    SCORES_STRIDE,
    max_tile_vectors,
    multiply_by_scales,
    output_tile,
    score_tile,
)
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, word
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.softmax import add_biases, cap_scores, weigh
from shmllm_kernels.cpu.windows import first_visible

MAX_GROUP_ROWS = 6
SCORES_BYTES = MAX_GROUP_ROWS * SCORES_STRIDE
FACTORS_BYTES = 64


class RowGroup(NamedTuple):
    """A few rows of a query tile, with their running softmax and output. All but the first two
    fields are addresses."""

    first_position: int  # of the tile's first query
    row: int  # index of the first row in the tile
    query: int  # float32 [head_dim, rows], multiplied by scale and log2(e)
    out: int  # float32 [rows, padded]
    weight_sums: int  # float32 [rows, LANES]
    max_scores: int  # float32 [rows]
    scores: int  # scratch memory of SCORES_BYTES
    factors: int  # scratch memory of FACTORS_BYTES
    ends: int  # of the keys that each of the tile's queries sees, int64; 0: it sees none behind it


class KeyChunk(NamedTuple):
    """Consecutive keys and their values. Strides are in bytes."""

    keys: int  # address of the table of addresses of vectors of keys
    values: int  # address of the table of addresses of their values
    scales: int  # address of the table of addresses of the keys' scales; unused but for int8
    scale_row_bytes: int  # from the scales of keys to those of values
    first_key: int  # position
    end_key: int
    keys_per_vector: int
    dimension_stride: int
    value_stride: int
    key_bytes: int  # from a head's keys to its values
    head_dim: int
    padded: int  # value_dim padded to whole vectors
    heads_per_kv: int
    window: int  # see `windows.window_number`
    cap: float  # of scores, multiplied by log2(e); 0: none
    biases: int  # address of that of position 0, of the first query and head; 0: there are none
    biases_stride: int  # from one head to the next
    biases_step: int  # from one query to the next


@compiled
def _end_of_keys(group, chunk, row):
    """Returns the position behind the last one that a row of the tile attends to."""
    query = row // chunk.heads_per_kv
    return word(group.ends, query) if group.ends != 0 else group.first_position + query + 1


def _make_score(num_rows: int):
    """Returns score(query, out, keys, stride, dim, behind, first, end, kind) for `num_rows` rows:
    arguments of `score_tile`, and two vectors of a chunk."""
    wide = max_tile_vectors(num_rows)
    half = max(wide // 2, 2)
    score_wide, score_half = score_tile(num_rows, wide), score_tile(num_rows, half)
    score_two = score_tile(num_rows, 2)

    @compiled
    def score(query, out, keys, stride, dim, behind, first, end, kind):
        """Computes the scores of the vectors from `first` to `end`, and possibly of some vectors
        next to them."""
        vector = first // wide * wide
        while vector < end:
            table, row = keys + 8 * vector, out + 4 * LANES * vector
            if end - vector > half:
                score_wide(query, table, stride, dim, row, behind, kind)
                vector += wide
            elif end - vector > 2:
                score_half(query, table, stride, dim, row, behind, kind)
                vector += half
            else:
                score_two(query, table, stride, dim, row, behind, kind)
                vector += 2

    return score


def _make_weigh_rows(num_rows: int):
    @compiled
    def weigh_rows(group, chunk, first, end):
        """Turns the scores of the vectors from `first` to `end` into softmax weights."""
        key = chunk.first_key + first * chunk.keys_per_vector
        factors = floats(group.factors)
        if chunk.cap > 0:
            for i in range(num_rows):
                cap_scores(
                    group.scores + i * SCORES_STRIDE + 4 * LANES * first, end - first, chunk.cap
                )
        for i in range(num_rows):
            query = (group.row + i) // chunk.heads_per_kv
            visible = first_visible(group.first_position + query, chunk.window)
            if chunk.biases != 0:
                head = (group.row + i) % chunk.heads_per_kv
                biases = chunk.biases + head * chunk.biases_stride + query * chunk.biases_step
                add_biases(
                    group.scores + i * SCORES_STRIDE + 4 * LANES * first, end - first,
                    chunk.keys_per_vector, biases + 4 * key,
                    _end_of_keys(group, chunk, group.row + i) - key,
                )  # fmt: skip
            factors[i] = weigh(
                group.scores + i * SCORES_STRIDE + 4 * LANES * first, end - first,
                chunk.keys_per_vector, key - visible,
                _end_of_keys(group, chunk, group.row + i) - visible,
                group.max_scores + 4 * i, group.weight_sums + 4 * LANES * i,
            )  # fmt: skip

    return weigh_rows


def _make_add_values(num_rows: int):
    columns = min(max_tile_vectors(num_rows), 4)
    add_columns, add_column = output_tile(num_rows, columns), output_tile(num_rows, 1)

    @compiled
    def add_values(group, chunk, first, end, first_key, end_key, kind):
        """Adds the weighted values of the keys from `first_key` to `end_key`, which are in the
        vectors from `first` to `end`, to the output."""
        whole, stride = chunk.keys_per_vector, chunk.value_stride
        key = chunk.first_key + first * whole
        begin, last = first_key - key, end_key - key - (end - first - 1) * whole
        weights, values = group.scores + 4 * LANES * first, chunk.values + 8 * first
        vectors = chunk.padded // LANES
        vector = 0
        while vector < vectors:
            skip, out = vector * (stride // vectors), group.out + 4 * LANES * vector
            if vector + columns <= vectors:
                add_columns(
                    weights, values, skip, end - first, begin, last, whole, stride, group.factors,
                    out, 4 * chunk.padded, -chunk.key_bytes, kind,
                )  # fmt: skip
                vector += columns
            else:
                add_column(
                    weights, values, skip, end - first, begin, last, whole, stride, group.factors,
                    out, 4 * chunk.padded, -chunk.key_bytes, kind,
                )  # fmt: skip
                vector += 1

    return add_values


def _make_attend_group(num_rows: int):
    """Returns attend_group(group, chunk, kind) for groups of `num_rows` rows."""
    score, weigh_rows = SCORE_GROUP[num_rows], _make_weigh_rows(num_rows)
    add_values = _make_add_values(num_rows)

    @compiled
    def attend_group(group, chunk, kind):
        first_position = group.first_position + group.row // chunk.heads_per_kv
        first_key = max(first_visible(first_position, chunk.window), chunk.first_key)
        end_key = min(_end_of_keys(group, chunk, group.row + num_rows - 1), chunk.end_key)
        if first_key >= end_key:
            return
        whole = chunk.keys_per_vector
        first = (first_key - chunk.first_key) // whole
        end = (end_key - 1 - chunk.first_key) // whole + 1
        score(
            group.query, group.scores, chunk.keys, chunk.dimension_stride, chunk.head_dim,
            chunk.key_bytes, first, end, kind,
        )  # fmt: skip
        scales, scores = chunk.scales + 8 * first, group.scores + 4 * LANES * first
        if kind == "int8":
            for i in range(num_rows):
                multiply_by_scales(scores + i * SCORES_STRIDE, scales, 0, end - first)
        weigh_rows(group, chunk, first, end)
        if kind == "int8":
            for i in range(num_rows):
                multiply_by_scales(
                    scores + i * SCORES_STRIDE, scales, chunk.scale_row_bytes, end - first
                )
        add_values(group, chunk, first, end, first_key, end_key, kind)

    return attend_group


_SIZES = (1, 2, 3, 4, MAX_GROUP_ROWS)
SCORE_GROUP = {num_rows: _make_score(num_rows) for num_rows in _SIZES}
"""Functions by the number of rows in the group; see `_make_score`."""
ATTEND_GROUP = {num_rows: _make_attend_group(num_rows) for num_rows in _SIZES}
"""Functions by the number of rows in the group."""
