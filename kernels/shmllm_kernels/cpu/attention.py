"""Causal attention of a step's tokens over their requests' blocks of keys and values.

A piece of work is a tile of one request's queries with one key-value head; the query heads that
share it are further rows. Keys come in stretches that begin at fixed positions, with a softmax
that goes along. So what a token gets depends, to the last bit, on its query and on the keys
and values that it sees, and on nothing else: not on who else is in the batch, nor on when the keys
were written.

Owns what a piece is and how its rows begin and end; must not know how keys were written (`heads`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_blocks import Tile, find_stretch
from shmllm_kernels.cpu.attention_rows import FACTORS_BYTES, GROUPS, SCORES_BYTES, Rows, Stretch
from shmllm_kernels.cpu.attention_tiles import KEY_VECTORS
from shmllm_kernels.cpu.cache_layout import CacheLayout
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    itemsize,
    word,
)
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.softmax import LEAST, total_weight

ROWS_PER_TILE = 48
"""Rows of queries that share a stretch of keys while it is in the nearest caches, at most."""

_GROUP_OF_6, _GROUP_OF_4, _GROUP_OF_3, _GROUP_OF_2, _GROUP_OF_1 = (
    GROUPS[size] for size in (6, 4, 3, 2, 1)
)


class Space(NamedTuple):
    """Addresses of a thread's scratch memory."""

    query: int  # [groups of rows][head_dim, rows of the group] float32
    out: int  # [rows, padded head_dim] float32
    totals: int  # [rows, LANES] float32
    greatest: int  # [rows] float32
    scores: int
    factors: int
    keys: int  # addresses of the keys of a stretch, by vectors
    values: int  # of its values, and of what is needed next


@compiled
def _lines(num_bytes):
    """Rounded up to whole cache lines."""
    return (num_bytes + 63) // 64 * 64


@compiled
def queries_per_tile(heads_per_kv: int) -> int:
    """How many queries of a request one piece of work has."""
    return max(ROWS_PER_TILE // heads_per_kv, 1)


def count_tiles(counts: NDArray[np.int64], heads_per_kv: int, out: NDArray[np.int64]) -> None:
    """Fill `out` [len(counts) + 1] with the tiles of queries before each request, and of all.

    Args:
        counts: tokens of each request in the step.
        heads_per_kv: query heads that share a key-value head.
    """
    queries = queries_per_tile(heads_per_kv)
    out[0] = 0
    np.cumsum((counts + (queries - 1)) // queries, out=out[1 : len(counts) + 1])


def scratch_bytes(layout: CacheLayout, num_heads: int) -> int:
    """Scratch memory of one thread."""
    per_kv = num_heads // layout.num_kv_heads
    rows = queries_per_tile(per_kv) * per_kv
    padded = layout.values_shape[1]
    sizes = [rows * layout.head_dim, rows * padded, rows * LANES, rows]
    tables = [8 * KEY_VECTORS, 16 * KEY_VECTORS]
    return sum(map(_lines, [*(4 * size for size in sizes), SCORES_BYTES, FACTORS_BYTES, *tables]))


@compiled
def _space(scratch, rows, head_dim, padded):
    out = scratch + _lines(4 * rows * head_dim)
    totals = out + _lines(4 * rows * padded)
    greatest = totals + _lines(4 * rows * LANES)
    scores = greatest + _lines(4 * rows)
    factors = scores + SCORES_BYTES
    keys = factors + FACTORS_BYTES
    values = keys + _lines(8 * KEY_VECTORS)
    return Space(scratch, out, totals, greatest, scores, factors, keys, values)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_requests = word(word(operands, 0), 1)
    return word(word(word(operands, 1), 6), num_requests) * word(word(operands, 2), at.NUM_KV_HEADS)


@compiled
def _find_tile(step, requests, heads, window, piece):
    """Which queries a piece is about."""
    num_kv_heads = word(heads, at.NUM_KV_HEADS)
    tile, kv_head = piece // num_kv_heads, piece % num_kv_heads
    before = word(requests, 6)
    request, end = 0, word(step, 1)
    while end - request > 1:
        middle = (request + end) // 2
        if word(before, middle) <= tile:
            request = middle
        else:
            end = middle
    per_tile = queries_per_tile(word(heads, at.NUM_HEADS) // num_kv_heads)
    first = (tile - word(before, request)) * per_tile
    count = word(word(requests, 1), request)
    num_queries = min(per_tile, count - first)
    position = word(word(requests, 2), request) - count + first
    return Tile(
        word(word(requests, 0), request) + first,
        position,
        num_queries,
        kv_head,
        word(requests, 4) + word(word(requests, 3), request) * word(requests, 5) * 4,
        max(position - window + 1, 0) if window > 0 else 0,
        position + num_queries - 1,
    )


@compiled
def _group_size(rows_left):
    """How many rows go together."""
    if rows_left > 8 or rows_left == 6:
        return 6
    return 4 if rows_left > 3 else rows_left


@compiled
def _fill(address, count, number):
    values = floats(address)
    for i in range(count):
        values[i] = np.float32(number)


@compiled
def _begin(space, rows, padded, tile, heads, qkv, qkv_stride):
    """Take in the queries, scaled, each group's rows side by side."""
    _fill(space.out, rows * padded, 0.0)
    _fill(space.totals, rows * LANES, 0.0)
    _fill(space.greatest, rows, LEAST)
    head_dim, scale = word(heads, at.HEAD_DIM), float_of_word(word(heads, at.SCALE))
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    row = 0
    while row < rows:
        size = _group_size(rows - row)
        packed = floats(space.query + 4 * row * head_dim)
        for i in range(size):
            token = tile.first_token + (row + i) // per_kv
            head = tile.kv_head * per_kv + (row + i) % per_kv
            query = floats(qkv + token * qkv_stride + 4 * head * head_dim)
            for j in range(head_dim):
                packed[j * size + i] = query[j] * scale
        row += size


@compiled
def _end(space, rows, padded, tile, heads, out, out_stride):
    """Write the quotients."""
    head_dim = word(heads, at.HEAD_DIM)
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    for row in range(rows):
        share = np.float32(1.0) / total_weight(space.totals + 4 * row * LANES)
        token = tile.first_token + row // per_kv
        head = tile.kv_head * per_kv + row % per_kv
        target = floats(out + token * out_stride + 4 * head * head_dim)
        summed = floats(space.out + 4 * row * padded)
        for j in range(head_dim):
            target[j] = summed[j] * share + np.float32(0.0)  # a zero has no sign


@compiled
def _see_stretch(space, rows, padded, tile, heads, window, first_vector, kind):
    """Every row of a tile sees one stretch of keys."""
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    keys_per_vector, head_dim = word(heads, at.KEYS_PER_VECTOR), word(heads, at.HEAD_DIM)
    first_key = first_vector * keys_per_vector
    stretch = Stretch(
        space.keys, space.values, first_key, first_key + KEY_VECTORS * keys_per_vector,
        keys_per_vector, word(heads, at.DIMENSION_BYTES), word(heads, at.VALUE_ROW_BYTES),
        word(heads, at.KEY_BYTES), head_dim, padded, per_kv, window,
    )  # fmt: skip
    row = 0
    while row < rows:
        size = _group_size(rows - row)
        group = Rows(
            tile.first_position, row, space.query + 4 * row * head_dim,
            space.out + 4 * row * padded, space.totals + 4 * row * LANES,
            space.greatest + 4 * row, space.scores, space.factors,
        )  # fmt: skip
        if size == 6:
            _GROUP_OF_6(group, stretch, kind)
        elif size == 4:
            _GROUP_OF_4(group, stretch, kind)
        elif size == 3:
            _GROUP_OF_3(group, stretch, kind)
        elif size == 2:
            _GROUP_OF_2(group, stretch, kind)
        else:
            _GROUP_OF_1(group, stretch, kind)
        row += size


@compiled
def _attend(operands, piece, thread, num_threads, kind):
    step, requests, heads = word(operands, 0), word(operands, 1), word(operands, 2)
    cache, window = word(operands, 7), word(operands, 8)
    tile = _find_tile(step, requests, heads, window, piece)
    rows = tile.num_queries * (word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS))
    padded = word(heads, at.VALUE_ROW_BYTES) // itemsize(kind)
    scratch = word(operands, 9) + thread * word(operands, 10)
    space = _space(scratch, rows, word(heads, at.HEAD_DIM), padded)
    _begin(space, rows, padded, tile, heads, word(operands, 3), word(operands, 4))
    keys_per_vector = word(heads, at.KEYS_PER_VECTOR)
    vector = tile.first_key // (KEY_VECTORS * keys_per_vector) * KEY_VECTORS
    while vector * keys_per_vector <= tile.last_key:
        find_stretch(space.keys, space.values, cache, heads, tile, vector, kind)
        _see_stretch(space, rows, padded, tile, heads, window, vector, kind)
        vector += KEY_VECTORS
    _end(space, rows, padded, tile, heads, word(operands, 5), word(operands, 6))


ATTEND = {
    "float32": Kernel(_pieces, _attend, "float32"),
    "float16": Kernel(_pieces, _attend, "float16"),
    "bfloat16": Kernel(_pieces, _attend, "bfloat16"),
}
"""By the kind of the cache. Every token over what its request has in the cache.

Operands, addresses but for numbers (strides in bytes):

    0  step: words, the number of tokens, of requests
    1  requests: words, see `request_words`
    2  heads: words, see `cache_layout.head_words`
    3  qkv: float32 rows, the queries' heads first     4  its stride
    5  out: float32 rows, a head behind the other      6  its stride
    7  the layer's cache, see `CacheLayout`
    8  window: how many positions a token sees, itself included; 0: all
    9  scratch memory of the first thread             10  its stride, at least `scratch_bytes`
"""


def request_words(
    first_tokens: int,
    counts: int,
    context_lens: int,
    rows: int,
    block_table: int,
    max_blocks: int,
    tiles: int,
) -> NDArray[np.int64]:
    """What ATTEND must know of a step's requests.

    Args:
        first_tokens: address of int64 [requests]: where a request's tokens begin in the step.
        counts: address of int64 [requests]: how many there are.
        context_lens: address of int64 [requests]: position of the last of them, plus one.
        rows: address of int64 [requests]: rows of the block table.
        block_table: address of int32 [rows, max_blocks].
        max_blocks: number.
        tiles: address of int64 [requests + 1], from `count_tiles`.
    """
    words = first_tokens, counts, context_lens, rows, block_table, max_blocks, tiles
    return np.array(words, np.int64)
