"""Causal attention of a step's tokens over the paged keys and values of their requests.

A piece of work is a tile of one request's queries with one key-value head; each query head that
shares it adds a row. Keys are processed in chunks that begin at fixed positions, with an online
softmax. So a token's result depends, to the last bit, only on its query and on the keys and values
that it attends to: not on the other requests in the batch, nor on the step that wrote the keys.

This module owns the division into pieces and the start and end of a tile's rows. It must not know
how keys were written, which is the task of `heads`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_blocks import QueryTile, find_key_chunk
from shmllm_kernels.cpu.attention_rows import (
    ATTEND_GROUP,
    FACTORS_BYTES,
    SCORES_BYTES,
    KeyChunk,
    RowGroup,
)
from shmllm_kernels.cpu.attention_tiles import KEY_VECTORS
from shmllm_kernels.cpu.cache_layout import CacheLayout
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    itemsize,
    number,
    word,
)
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.softmax import INITIAL_MAX_SCORE, total_weight

LOG2_E = 1.4426950408889634
ROWS_PER_TILE = 48
"""The largest number of query rows in a tile, which share a chunk of keys while it is in the L1 and
L2 caches."""

_attend_6, _attend_4, _attend_3, _attend_2, _attend_1 = (
    ATTEND_GROUP[size] for size in (6, 4, 3, 2, 1)
)


class Scratch(NamedTuple):
    """The addresses of the parts of a thread's scratch memory."""

    query: int  # [groups of rows][head_dim, rows of the group] float32
    out: int  # [rows, padded head_dim] float32
    weight_sums: int  # [rows, LANES] float32
    max_scores: int  # [rows] float32
    scores: int
    factors: int
    keys: int  # table of addresses of a chunk's vectors of keys
    values: int  # table of addresses of its values, and of those to prefetch
    scales: int  # table of addresses of its keys' scales


@compiled
def _cache_lines(num_bytes):
    """Rounds a size up to whole cache lines."""
    return (num_bytes + 63) // 64 * 64


@compiled
def queries_per_tile(heads_per_kv: int) -> int:
    """Returns the largest number of a request's queries in one tile."""
    return max(ROWS_PER_TILE // heads_per_kv, 1)


def count_tiles(counts: NDArray[np.int64], heads_per_kv: int, out: NDArray[np.int64]) -> None:
    """Counts the tiles of queries before each request.

    Args:
        counts: the number of each request's tokens in the step.
        heads_per_kv: the number of query heads that share a key-value head.
        out: [len(counts) + 1]; gets the number of tiles before each request, and the total.
    """
    queries = queries_per_tile(heads_per_kv)
    out[0] = 0
    np.cumsum((counts + (queries - 1)) // queries, out=out[1 : len(counts) + 1])


def scratch_bytes(layout: CacheLayout, num_heads: int) -> int:
    """Returns the size of one thread's scratch memory."""
    per_kv = num_heads // layout.num_kv_heads
    rows = queries_per_tile(per_kv) * per_kv
    padded = layout.values_shape[1]
    sizes = [rows * layout.head_dim, rows * padded, rows * LANES, rows]
    tables = [8 * KEY_VECTORS, 16 * KEY_VECTORS, 8 * KEY_VECTORS]
    return sum(
        map(_cache_lines, [*(4 * size for size in sizes), SCORES_BYTES, FACTORS_BYTES, *tables])
    )


@compiled
def _split_scratch(address, rows, head_dim, padded):
    out = address + _cache_lines(4 * rows * head_dim)
    weight_sums = out + _cache_lines(4 * rows * padded)
    max_scores = weight_sums + _cache_lines(4 * rows * LANES)
    scores = max_scores + _cache_lines(4 * rows)
    factors = scores + SCORES_BYTES
    keys = factors + FACTORS_BYTES
    values = keys + _cache_lines(8 * KEY_VECTORS)
    scales = values + _cache_lines(16 * KEY_VECTORS)
    return Scratch(address, out, weight_sums, max_scores, scores, factors, keys, values, scales)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_requests = word(word(operands, 0), 1)
    return word(word(word(operands, 1), 6), num_requests) * word(word(operands, 2), at.NUM_KV_HEADS)


@compiled
def _find_tile(step, requests, heads, window, piece):
    """Returns the tile of queries of a piece."""
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
    return QueryTile(
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
    """Returns the number of rows in the next group."""
    if rows_left > 8 or rows_left == 6:
        return 6
    return 4 if rows_left > 3 else rows_left


@compiled
def _fill(address, count, number):
    values = floats(address)
    for i in range(count):
        values[i] = np.float32(number)


@compiled
def _load_queries(scratch, rows, padded, tile, heads, qkv, qkv_stride, sinks, kind):
    """Initialises a tile's rows and copies its scaled queries, with the rows of each group side by
    side. A sink is a score without a value: the row begins with it, and a weight of 1."""
    _fill(scratch.out, rows * padded, 0.0)
    _fill(scratch.weight_sums, rows * LANES, 0.0)
    _fill(scratch.max_scores, rows, INITIAL_MAX_SCORE)
    head_dim, scale = word(heads, at.HEAD_DIM), float_of_word(word(heads, at.SCALE))
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    if sinks != 0:
        max_scores, weight_sums = floats(scratch.max_scores), floats(scratch.weight_sums)
        for i in range(rows):
            sink = number(sinks, tile.kv_head * per_kv + i % per_kv, kind)
            max_scores[i] = sink * np.float32(LOG2_E)
            weight_sums[i * LANES] = np.float32(1.0)
    row = 0
    while row < rows:
        size = _group_size(rows - row)
        packed = floats(scratch.query + 4 * row * head_dim)
        for i in range(size):
            token = tile.first_token + (row + i) // per_kv
            head = tile.kv_head * per_kv + (row + i) % per_kv
            query = floats(qkv + token * qkv_stride + 4 * head * head_dim)
            for j in range(head_dim):
                packed[j * size + i] = query[j] * scale
        row += size


@compiled
def _store_output(scratch, rows, padded, tile, heads, out, out_stride):
    """Writes the sums of weighted values, divided by the sums of weights."""
    head_dim = word(heads, at.HEAD_DIM)
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    for row in range(rows):
        share = np.float32(1.0) / total_weight(scratch.weight_sums + 4 * row * LANES)
        token = tile.first_token + row // per_kv
        head = tile.kv_head * per_kv + row % per_kv
        target = floats(out + token * out_stride + 4 * head * head_dim)
        summed = floats(scratch.out + 4 * row * padded)
        for j in range(head_dim):
            target[j] = summed[j] * share + np.float32(0.0)  # adding 0 turns -0 into 0


@compiled
def _attend_chunk(scratch, rows, padded, tile, heads, window, cap, first_vector, kind):
    """Updates every row of a tile with one chunk of keys."""
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    keys_per_vector, head_dim = word(heads, at.KEYS_PER_VECTOR), word(heads, at.HEAD_DIM)
    first_key = first_vector * keys_per_vector
    chunk = KeyChunk(
        scratch.keys, scratch.values, scratch.scales, word(heads, at.SCALE_ROW_BYTES),
        first_key, first_key + KEY_VECTORS * keys_per_vector,
        keys_per_vector, word(heads, at.DIMENSION_BYTES), word(heads, at.VALUE_ROW_BYTES),
        word(heads, at.KEY_BYTES), head_dim, padded, per_kv, window, cap,
    )  # fmt: skip
    row = 0
    while row < rows:
        size = _group_size(rows - row)
        group = RowGroup(
            tile.first_position, row, scratch.query + 4 * row * head_dim,
            scratch.out + 4 * row * padded, scratch.weight_sums + 4 * row * LANES,
            scratch.max_scores + 4 * row, scratch.scores, scratch.factors,
        )  # fmt: skip
        if size == 6:
            _attend_6(group, chunk, kind)
        elif size == 4:
            _attend_4(group, chunk, kind)
        elif size == 3:
            _attend_3(group, chunk, kind)
        elif size == 2:
            _attend_2(group, chunk, kind)
        else:
            _attend_1(group, chunk, kind)
        row += size


@compiled
def _attend(operands, piece, thread, num_threads, stored, kind):
    step, requests, heads = word(operands, 0), word(operands, 1), word(operands, 2)
    cache, window = word(operands, 7), word(operands, 8)
    tile = _find_tile(step, requests, heads, window, piece)
    rows = tile.num_queries * (word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS))
    padded = word(heads, at.VALUE_ROW_BYTES) // itemsize(stored)
    address = word(operands, 9) + thread * word(operands, 10)
    scratch = _split_scratch(address, rows, word(heads, at.HEAD_DIM), padded)
    cap, sinks = float_of_word(word(operands, 11)), word(operands, 12)
    qkv, qkv_stride = word(operands, 3), word(operands, 4)
    _load_queries(scratch, rows, padded, tile, heads, qkv, qkv_stride, sinks, kind)
    keys_per_vector = word(heads, at.KEYS_PER_VECTOR)
    vector = tile.first_key // (KEY_VECTORS * keys_per_vector) * KEY_VECTORS
    while vector * keys_per_vector <= tile.last_key:
        find_key_chunk(
            scratch.keys, scratch.values, scratch.scales, cache, heads, tile, vector, stored
        )
        _attend_chunk(scratch, rows, padded, tile, heads, window, cap, vector, stored)
        vector += KEY_VECTORS
    _store_output(scratch, rows, padded, tile, heads, word(operands, 5), word(operands, 6))


ATTEND = {kinds: Kernel(_pieces, _attend, *kinds) for kinds in at.KINDS}
"""Kernels by the dtype names of the cache and of the sinks. Every token attends to its
request's keys in the cache.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `request_words`
    2  heads: words, see `cache_layout.head_words`
    3  qkv: float32 rows, which begin with the query heads
    4  the stride of qkv (a number)
    5  out: float32 rows, [num_heads, head_dim]
    6  the stride of out (a number)
    7  the layer's cache, see `CacheLayout`
    8  window: the number of positions that a token attends to, its own included; 0: all (a number)
    9  scratch memory of the first thread
    10 its stride from thread to thread, at least `scratch_bytes` (a number)
    11 cap: scaled scores become ``cap * tanh(score / cap)``; cap * log2(e), or 0 for none (a number
       from `word_of_float`)
    12 sinks: weights [num_heads], each the score of a key without a value, or 0 for none
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
    """Returns the description of a step's requests for ATTEND.

    Args:
        first_tokens: address of int64 [requests]: the index of each request's first token in the
            step.
        counts: address of int64 [requests]: the number of each request's tokens in the step.
        context_lens: address of int64 [requests]: the position of its last token, plus one.
        rows: address of int64 [requests]: the rows of the block table.
        block_table: address of int32 [rows, max_blocks].
        max_blocks: the number of columns of the block table.
        tiles: address of int64 [requests + 1], which `count_tiles` filled.
    """
    words = first_tokens, counts, context_lens, rows, block_table, max_blocks, tiles
    return np.array(words, np.int64)
