"""Causal attention of a step's tokens over the paged latents of their requests.

All query heads share one key head, whose first elements are the values: a tile of query rows, each
a token's head, reads a chunk of latents once for all of them. Pieces of work, splits of contexts
and the online softmax are those of `attention`, with shorter splits: a token's bits depend only on
its query and on the latents that it attends to.

This module owns the order of chunks and tiles. It must not know how latents were written, which is
the task of `latents`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmllm_kernels.cpu.attention_pieces import MAX_SPLITS, queries_per_tile
from shmllm_kernels.cpu.attention_state import (
    LOG2_E,
    cache_lines,
    clear,
    merge,
    state_at,
    state_bytes,
    store_output,
)
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_noinline
from shmllm_kernels.cpu.latent_layout import DTYPES, PAIR, LatentLayout, padded
from shmllm_kernels.cpu.latent_tiles import (
    TILE_KEYS,
    TILE_ROWS,
    score_tile,
    value_tile,
)
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    itemsize,
    put_word,
    short_words,
    word,
    word_of_float,
)
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.softmax import weigh

CHUNK_KEYS = 8 * LANES
"""The number of keys after which the softmax is updated. Chunks begin at multiples of it."""

SPLIT_KEYS = 256
"""The number of positions in a split. All heads share a key head, so that a short context has no
other pieces for several threads."""

SCORES_STRIDE = 4 * (CHUNK_KEYS + LANES)  # the last tile of a chunk may have more keys
"""The bytes from one row of a chunk's scores to the next."""

Entries = Literal["blocks", "slots", "addresses"]

KEYS_IN_TABLE = CHUNK_KEYS + 2 * TILE_KEYS  # what the last tile reads and prefetches
"""The number of addresses of a chunk's keys, and of some after them."""

_score_many, _score_four, _score_two, _score_one = (
    score_tile(rows) for rows in (TILE_ROWS, 4, 2, 1)
)
_many_values, _four_values, _two_values, _one_values = (
    value_tile(rows) for rows in (TILE_ROWS, 4, 2, 1)
)


class Scratch(NamedTuple):
    """The addresses of the parts of a thread's scratch memory."""

    query: int  # [rows, width] float32
    total: int  # the state after all splits
    state: int  # the state of a split
    scores: int  # [rows, CHUNK_KEYS and more] float32
    factors: int  # [rows] float32
    keys: int  # table of the addresses of a chunk's keys, and of some after them


class Tile(NamedTuple):
    """Consecutive queries of one request. All fields are int64."""

    first_token: int  # index in the step
    first_position: int
    num_queries: int
    blocks: int  # address of the request's row of the block table
    first_key: int  # the first and the last position that are attended to
    last_key: int
    split: int  # if the tile is one split of a context: its index in the step; else -1


class Sizes(NamedTuple):
    """The sizes of a layer, see `size_words`."""

    num_heads: int
    rank: int
    key_dim: int
    padded_rank: int
    width: int  # of a key, padded
    row_bytes: int
    block_shift: int  # the binary logarithm of the number of keys of an entry of the table
    slot_shift: int  # of the rows of a block, if an entry is a slot; 0: it is a block; -1: address
    block_stride: int
    scale: float


def size_words(
    layout: LatentLayout,
    num_heads: int,
    rank: int,
    scale: float,
    block_stride: int,
    entries: Entries = "blocks",
) -> NDArray[np.int64]:
    """Returns the sizes of a layer, for the kernels.

    Args:
        layout: the layout of its cache.
        num_heads: the number of query heads.
        rank: the width of a latent.
        scale: the factor of the scores.
        block_stride: the bytes from one block of the layer to the next.
        entries: what the block table has: the "blocks" of keys that follow each other, or of each
            key its slot, block * block_size + offset, or its address, an int64.
    """
    widths = [rank, layout.key_dim, padded(rank), padded(layout.key_dim)]
    shift, factor = layout.block_size.bit_length() - 1, word_of_float(scale * LOG2_E)
    shifts = {"blocks": (shift, 0), "slots": (0, shift), "addresses": (0, -1)}
    words = [num_heads, *widths, layout.row_bytes, *shifts[entries], block_stride, factor]
    return np.array(words, np.int64)


def scratch_bytes(layout: LatentLayout, num_heads: int, rank: int) -> int:
    """Returns the size of one thread's scratch memory."""
    rows = queries_per_tile(num_heads) * num_heads
    sizes = [4 * rows * padded(layout.key_dim), *[state_bytes(rows, padded(rank))] * 2]
    sizes += [rows * SCORES_STRIDE, 4 * rows, 8 * KEYS_IN_TABLE]
    return sum(map(cache_lines, sizes))


def split_states_bytes(num_heads: int, rank: int) -> int:
    """Returns the size of the memory for the states of a step's splits."""
    size: int = state_bytes(num_heads, padded(rank))
    return MAX_SPLITS * size


@compiled
def sizes_at(address):
    """Returns the sizes of a layer, from `size_words`."""
    return Sizes(
        word(address, 0), word(address, 1), word(address, 2), word(address, 3), word(address, 4),
        word(address, 5), word(address, 6), word(address, 7), word(address, 8),
        float_of_word(word(address, 9)),
    )  # fmt: skip


@compiled
def _divide_scratch(address, rows, sizes):
    total = address + cache_lines(4 * rows * sizes.width)
    state = total + state_bytes(rows, sizes.padded_rank)
    scores = state + state_bytes(rows, sizes.padded_rank)
    factors = scores + rows * SCORES_STRIDE
    return Scratch(address, total, state, scores, factors, factors + cache_lines(4 * rows))


@compiled
def _pieces(operands, piece, thread, num_threads):
    return word(word(word(operands, 1), 6), word(word(operands, 0), 1))


@compiled
def _find_tile(step, requests, num_heads, piece):
    """Returns the tile of queries of a piece."""
    before = word(requests, 6)
    request, end = 0, word(step, 1)
    while end - request > 1:
        middle = (request + end) // 2
        if word(before, middle) <= piece:
            request = middle
        else:
            end = middle
    index = piece - word(before, request)
    has_splits = word(word(requests, 7), request) >= 0
    per_tile = queries_per_tile(num_heads)
    first = 0 if has_splits else index * per_tile
    count = word(word(requests, 1), request)
    num_queries = min(per_tile, count - first)
    position = word(word(requests, 2), request) - count + first
    last_key = position + num_queries - 1
    return Tile(
        word(word(requests, 0), request) + first,
        position,
        num_queries,
        word(requests, 4) + word(word(requests, 3), request) * word(requests, 5) * 4,
        index * SPLIT_KEYS if has_splits else 0,
        min(last_key, (index + 1) * SPLIT_KEYS - 1) if has_splits else last_key,
        word(word(requests, 7), request) + index if has_splits else -1,
    )


@compiled
def _load_queries(operands, scratch, rows, tile, sizes):
    """Copies a tile's scaled queries, padded as the keys are."""
    latents, ropes, rank = word(operands, 3), word(operands, 5), sizes.rank
    for row in range(rows):
        token, head = tile.first_token + row // sizes.num_heads, row % sizes.num_heads
        scaled = floats(scratch.query + 4 * row * sizes.width)
        latent = floats(latents + token * word(operands, 4) + 4 * head * rank)
        rope = floats(ropes + token * word(operands, 6) + head * word(operands, 7))
        for i in range(rank):
            scaled[i] = latent[i] * sizes.scale
        for i in range(rank, sizes.key_dim):
            scaled[i] = rope[i - rank] * sizes.scale
        for i in range(sizes.key_dim, sizes.width):
            scaled[i] = np.float32(0.0)


@compiled
def find_keys(target, cache, sizes, blocks, first, last):
    """Writes the addresses of a chunk's keys, and of some after them. Keys after the last one get
    its address: unwritten memory, which may be NaN, is not read."""
    table = short_words(blocks)
    mask, slot_mask = (1 << sizes.block_shift) - 1, (1 << max(sizes.slot_shift, 0)) - 1
    for i in range(KEYS_IN_TABLE):
        key = min(first + i, last)
        if sizes.slot_shift < 0:
            put_word(target, i, word(blocks, key))
        else:
            entry = np.int64(table[key >> sizes.block_shift])
            block = cache + (entry >> sizes.slot_shift) * sizes.block_stride
            put_word(target, i, block + ((entry & slot_mask) + (key & mask)) * sizes.row_bytes)


@compiled_noinline
def score_rows(query, query_stride, keys, count, width, rows, out, kind):
    """Computes the scores of all rows with the first `count` keys of a chunk, and possibly with
    some more. A few keys at a time stay in the L1 cache for all rows."""
    for key in range(0, count, TILE_KEYS):
        table, place, row = keys + 8 * key, out + 4 * key, 0
        while row < rows:
            own, target = query + row * query_stride, place + row * SCORES_STRIDE
            if rows - row >= TILE_ROWS:
                _score_many(own, query_stride, table, width, target, SCORES_STRIDE, kind)
                row += TILE_ROWS
            elif rows - row >= 4:
                _score_four(own, query_stride, table, width, target, SCORES_STRIDE, kind)
                row += 4
            elif rows - row >= 2:
                _score_two(own, query_stride, table, width, target, SCORES_STRIDE, kind)
                row += 2
            else:
                _score_one(own, query_stride, table, width, target, SCORES_STRIDE, kind)
                row += 1


@compiled_noinline
def _add_values(weights, keys, count, rows, factors, out, width, kind):
    """Adds the weighted values of a chunk to the outputs of all rows. Some columns of all its keys
    at a time stay in the L1 cache for all rows."""
    stride = 4 * width
    for column in range(0, width, PAIR):
        skip, row = column * itemsize(kind), 0
        while row < rows:
            own, target = weights + row * SCORES_STRIDE, out + row * stride + 4 * column
            factor = factors + 4 * row
            if rows - row >= TILE_ROWS:
                _many_values(own, SCORES_STRIDE, keys, skip, count, factor, target, stride, kind)
                row += TILE_ROWS
            elif rows - row >= 4:
                _four_values(own, SCORES_STRIDE, keys, skip, count, factor, target, stride, kind)
                row += 4
            elif rows - row >= 2:
                _two_values(own, SCORES_STRIDE, keys, skip, count, factor, target, stride, kind)
                row += 2
            else:
                _one_values(own, SCORES_STRIDE, keys, skip, count, factor, target, stride, kind)
                row += 1


@compiled
def _attend_chunk(scratch, state, rows, tile, sizes, cache, first, last, kind):
    """Updates the state of every row of a tile with the keys of a chunk from `first` to `last`."""
    count = min(last + 1 - first, CHUNK_KEYS)
    find_keys(scratch.keys, cache, sizes, tile.blocks, first, last)
    score_rows(
        scratch.query, 4 * sizes.width, scratch.keys, count, sizes.width, rows, scratch.scores, kind
    )
    factors = floats(scratch.factors)
    for row in range(rows):
        position = tile.first_position + row // sizes.num_heads
        factors[row] = weigh(
            scratch.scores + row * SCORES_STRIDE, (count + LANES - 1) // LANES, LANES, first,
            position + 1, state.max_scores + 4 * row, state.weight_sums + 4 * LANES * row,
        )  # fmt: skip
    _add_values(
        scratch.scores, scratch.keys, count, rows, scratch.factors, state.out, sizes.padded_rank,
        kind,
    )  # fmt: skip


@compiled
def _attend_split(scratch, state, rows, tile, sizes, cache, first, kind):
    """Computes the state of the split that begins at a position; returns the one behind it."""
    end = first + SPLIT_KEYS
    last = min(tile.last_key, end - 1)
    clear(state, rows, sizes.padded_rank)
    while first <= last:
        _attend_chunk(scratch, state, rows, tile, sizes, cache, first, last, kind)
        first += CHUNK_KEYS
    return end


@compiled
def _attend(operands, piece, thread, num_threads, kind):
    sizes, cache = sizes_at(word(operands, 2)), word(operands, 10)
    tile = _find_tile(word(operands, 0), word(operands, 1), sizes.num_heads, piece)
    rows, width = tile.num_queries * sizes.num_heads, sizes.padded_rank
    scratch = _divide_scratch(word(operands, 11) + thread * word(operands, 12), rows, sizes)
    _load_queries(operands, scratch, rows, tile, sizes)
    first = tile.first_key
    if tile.split >= 0:
        own = word(operands, 13) + tile.split * state_bytes(rows, width)
        own_state = state_at(own, rows, width)
        _attend_split(scratch, own_state, rows, tile, sizes, cache, first, kind)
    else:
        total = state_at(scratch.total, rows, width)
        state = state_at(scratch.state, rows, width)
        clear(total, rows, width)
        while first <= tile.last_key:
            first = _attend_split(scratch, state, rows, tile, sizes, cache, first, kind)
            merge(total, state, rows, width)
        stride = word(operands, 9)
        store_output(
            total, rows, width, sizes.rank, sizes.num_heads, 0, word(operands, 14), "float32",
            word(operands, 8) + tile.first_token * stride, stride,
        )  # fmt: skip


@compiled
def _count_merges(operands, piece, thread, num_threads):
    num_requests = word(word(operands, 0), 1)
    return num_requests if word(word(word(operands, 1), 7), num_requests) > 0 else 0


@compiled
def _merge_splits(operands, piece, thread, num_threads):
    requests, sizes = word(operands, 1), sizes_at(word(operands, 2))
    first = word(word(requests, 7), piece)
    if first < 0:
        return
    rows, width = sizes.num_heads, sizes.padded_rank
    total = state_at(word(operands, 11) + thread * word(operands, 12), rows, width)
    clear(total, rows, width)
    count = word(word(requests, 6), piece + 1) - word(word(requests, 6), piece)
    for split in range(first, first + count):
        own = word(operands, 13) + split * state_bytes(rows, width)
        merge(total, state_at(own, rows, width), rows, width)
    stride = word(operands, 9)
    store_output(
        total, rows, width, sizes.rank, rows, 0, word(operands, 14), "float32",
        word(operands, 8) + word(word(requests, 0), piece) * stride, stride,
    )  # fmt: skip


ATTEND_LATENTS = {kind: Kernel(_pieces, _attend, kind) for kind in DTYPES}
"""Kernels by the dtype name of the cache. Every token attends to its request's latents.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `attention.request_words`; `attention.count_pieces` with SPLIT_KEYS
       divides them
    2  sizes: words, see `size_words`
    3  latent queries: float32 rows, [num_heads, rank]
    4  their stride (a number)
    5  the rotated part of the first query head, float32
    6  the stride from token to token, and 7 from head to head (numbers)
    8  out: float32 rows, [num_heads, rank]; may be the latent queries
    9  the stride of out (a number)
    10 the layer's cache, see `LatentLayout`
    11 scratch memory of the first thread
    12 its stride from thread to thread, at least `scratch_bytes` (a number)
    13 memory for the states of splits, `split_states_bytes`
    14 sinks: float32 [num_heads], each the score of a key without a value, or 0 for none
"""

MERGE_LATENTS = Kernel(_count_merges, _merge_splits)
"""Runs after ATTEND_LATENTS and writes the output of requests whose splits were pieces of their
own. It has the same operands."""
