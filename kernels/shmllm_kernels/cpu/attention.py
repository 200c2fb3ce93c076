"""Attention of a step's tokens over the paged keys and values of their requests: over those up to
their own positions, or up to ends that each of them has.

A piece of work is a tile of one request's queries with one key-value head; each query head that
shares it adds a row. If a request has a single query, each split of its context is a piece, and a
second kernel merges their states: few requests with long contexts keep all threads busy. Keys are
processed in chunks that begin at fixed positions, with an online softmax. So a token's result
depends, to the last bit, only on its query and on the keys and values that it attends to: not on
the other requests in the batch, nor on the step that wrote the keys, nor on what is a piece.

This module owns the start of a tile's rows, and the order of chunks. It must not know how keys were
written, which is the task of `heads`.
"""

from __future__ import annotations

from typing import NamedTuple

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_blocks import find_key_chunk
from shmllm_kernels.cpu.attention_in_tiles import ATTEND_IN_TILES
from shmllm_kernels.cpu.attention_job import scratch_bytes_in_tiles
from shmllm_kernels.cpu.attention_pieces import (
    MAX_SPLITS,
    biases_of,
    biases_step,
    find_tile,
    num_pieces,
    queries_per_tile,
)
from shmllm_kernels.cpu.attention_rows import (
    ATTEND_GROUP,
    FACTORS_BYTES,
    SCORES_BYTES,
    KeyChunk,
    RowGroup,
)
from shmllm_kernels.cpu.attention_state import (
    SPLIT_KEYS,
    cache_lines,
    clear,
    merge,
    state_at,
    state_bytes,
    store_output,
)
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

_attend_6, _attend_4, _attend_3, _attend_2, _attend_1 = (
    ATTEND_GROUP[size] for size in (6, 4, 3, 2, 1)
)


class Scratch(NamedTuple):
    """The addresses of the parts of a thread's scratch memory."""

    query: int  # [groups of rows][head_dim, rows of the group] float32
    total: int  # the state after all splits
    state: int  # the state of a split
    scores: int
    factors: int
    keys: int  # table of addresses of a chunk's vectors of keys
    values: int  # table of addresses of its values, and of those to prefetch
    scales: int  # table of addresses of its keys' scales


def scratch_bytes(layout: CacheLayout, num_heads: int) -> int:
    """Returns the size of one thread's scratch memory."""
    if layout.is_tiled:
        return scratch_bytes_in_tiles(layout, num_heads)
    per_kv = num_heads // layout.num_kv_heads
    rows = queries_per_tile(per_kv) * per_kv
    sizes = [4 * rows * layout.head_dim, *[state_bytes(rows, layout.values_shape[1])] * 2]
    tables = [8 * KEY_VECTORS, 16 * KEY_VECTORS, 8 * KEY_VECTORS]
    return sum(map(cache_lines, [*sizes, SCORES_BYTES, FACTORS_BYTES, *tables]))


def split_states_bytes(layout: CacheLayout, num_heads: int) -> int:
    """Returns the size of the memory for the states of a step's splits."""
    per_kv = num_heads // layout.num_kv_heads
    size: int = state_bytes(per_kv, layout.values_shape[1])
    return MAX_SPLITS * layout.num_kv_heads * size


@compiled
def _divide_scratch(address, rows, head_dim, padded):
    total = address + cache_lines(4 * rows * head_dim)
    state = total + state_bytes(rows, padded)
    scores = state + state_bytes(rows, padded)
    factors = scores + SCORES_BYTES
    keys = factors + FACTORS_BYTES
    values = keys + cache_lines(8 * KEY_VECTORS)
    return Scratch(
        address, total, state, scores, factors, keys, values, values + cache_lines(16 * KEY_VECTORS)
    )


@compiled
def _group_size(rows_left):
    """Returns the number of rows in the next group."""
    if rows_left > 8 or rows_left == 6:
        return 6
    return 4 if rows_left > 3 else rows_left


@compiled
def _load_queries(scratch, rows, tile, heads, qkv, qkv_stride):
    """Copies a tile's scaled queries, with the rows of each group side by side."""
    head_dim, scale = word(heads, at.HEAD_DIM), float_of_word(word(heads, at.SCALE))
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
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
def _attend_chunk(scratch, state, rows, padded, tile, heads, operands, first_vector, kind):
    """Updates the state of every row of a tile with one chunk of keys."""
    per_kv = word(heads, at.NUM_HEADS) // word(heads, at.NUM_KV_HEADS)
    keys_per_vector, head_dim = word(heads, at.KEYS_PER_VECTOR), word(heads, at.HEAD_DIM)
    first_key = first_vector * keys_per_vector
    chunk = KeyChunk(
        scratch.keys, scratch.values, scratch.scales, word(heads, at.SCALE_ROW_BYTES),
        first_key, first_key + KEY_VECTORS * keys_per_vector,
        keys_per_vector, word(heads, at.DIMENSION_BYTES), word(heads, at.VALUE_ROW_BYTES),
        word(heads, at.KEY_BYTES), head_dim, padded, per_kv, word(operands, 8),
        float_of_word(word(operands, 11)), biases_of(operands, tile, per_kv), word(operands, 16),
        biases_step(operands),
    )  # fmt: skip
    row = 0
    while row < rows:
        size = _group_size(rows - row)
        group = RowGroup(
            tile.first_position, row, scratch.query + 4 * row * head_dim,
            state.out + 4 * row * padded, state.weight_sums + 4 * row * LANES,
            state.max_scores + 4 * row, scratch.scores, scratch.factors, tile.ends,
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
def _attend_split(scratch, state, rows, padded, tile, heads, operands, vector, kind):
    """Computes the state of one split, from the chunk of keys that begins at `vector`; returns the
    vector behind it."""
    keys_per_vector, cache = word(heads, at.KEYS_PER_VECTOR), word(operands, 7)
    split = vector * keys_per_vector // SPLIT_KEYS
    last_key = min(tile.last_key, (split + 1) * SPLIT_KEYS - 1)
    clear(state, rows, padded)
    while vector * keys_per_vector <= last_key:
        find_key_chunk(
            scratch.keys, scratch.values, scratch.scales, cache, heads, tile, vector, kind
        )
        _attend_chunk(scratch, state, rows, padded, tile, heads, operands, vector, kind)
        vector += KEY_VECTORS
    return vector


@compiled
def _attend(operands, piece, thread, num_threads, stored, kind):
    step, requests, heads = word(operands, 0), word(operands, 1), word(operands, 2)
    tile = find_tile(step, requests, heads, word(operands, 8), word(operands, 14), piece)
    num_kv_heads = word(heads, at.NUM_KV_HEADS)
    per_kv = word(heads, at.NUM_HEADS) // num_kv_heads
    rows = tile.num_queries * per_kv
    padded = word(heads, at.VALUE_ROW_BYTES) // itemsize(stored)
    address = word(operands, 9) + thread * word(operands, 10)
    scratch = _divide_scratch(address, rows, word(heads, at.HEAD_DIM), padded)
    qkv_stride, out_stride = word(operands, 4), word(operands, 6)
    _load_queries(scratch, rows, tile, heads, word(operands, 3), qkv_stride)
    vector = tile.first_key // (KEY_VECTORS * word(heads, at.KEYS_PER_VECTOR)) * KEY_VECTORS
    own = (tile.split * num_kv_heads + tile.kv_head) * state_bytes(rows, padded)
    is_split = tile.split >= 0
    state = state_at(word(operands, 13) + own if is_split else scratch.state, rows, padded)
    total = state_at(scratch.total, rows, padded)
    clear(total, rows, padded)
    # `_attend_split` is inlined in one place, since its code is most of the kernel's. A split that
    # has no keys gets a state, too.
    while is_split or vector * word(heads, at.KEYS_PER_VECTOR) <= tile.last_key:
        vector = _attend_split(scratch, state, rows, padded, tile, heads, operands, vector, stored)
        if is_split:
            return
        merge(total, state, rows, padded)
    store_output(
        total, rows, padded, word(heads, at.VALUE_DIM), per_kv, tile.kv_head * per_kv,
        word(operands, 12), kind,
        word(operands, 5) + tile.first_token * out_stride, out_stride,
    )  # fmt: skip


@compiled
def _count_merges(operands, piece, thread, num_threads):
    num_requests = word(word(operands, 0), 1)
    has_splits = word(word(word(operands, 1), 7), num_requests) > 0
    return num_requests * word(word(operands, 2), at.NUM_KV_HEADS) if has_splits else 0


@compiled
def _merge_splits(operands, piece, thread, num_threads, stored, kind):
    requests, heads = word(operands, 1), word(operands, 2)
    num_kv_heads = word(heads, at.NUM_KV_HEADS)
    request, kv_head = piece // num_kv_heads, piece % num_kv_heads
    first = word(word(requests, 7), request)
    if first < 0:
        return
    per_kv = word(heads, at.NUM_HEADS) // num_kv_heads
    padded = word(heads, at.VALUE_ROW_BYTES) // itemsize(stored)
    total = state_at(word(operands, 9) + thread * word(operands, 10), per_kv, padded)
    clear(total, per_kv, padded)
    count = word(word(requests, 6), request + 1) - word(word(requests, 6), request)
    for split in range(first, first + count):
        own = (split * num_kv_heads + kv_head) * state_bytes(per_kv, padded)
        merge(total, state_at(word(operands, 13) + own, per_kv, padded), per_kv, padded)
    out_stride = word(operands, 6)
    store_output(
        total, per_kv, padded, word(heads, at.VALUE_DIM), per_kv, kv_head * per_kv,
        word(operands, 12), kind,
        word(operands, 5) + word(word(requests, 0), request) * out_stride, out_stride,
    )  # fmt: skip


ATTEND = {kinds: Kernel(num_pieces, _attend, *kinds) for kinds in at.KINDS} | ATTEND_IN_TILES
"""Kernels by the dtype names of the cache and of the sinks. Every token attends to its
request's keys in the cache.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `attention_pieces.request_words`
    2  heads: words, see `cache_layout.head_words`
    3  qkv: float32 rows, which begin with the query heads
    4  the stride of qkv (a number)
    5  out: float32 rows, [num_heads, value_dim]
    6  the stride of out (a number)
    7  the layer's cache, see `CacheLayout`
    8  window: where the keys of a token begin, see `windows.window_number` (a number)
    9  scratch memory of the first thread
    10 its stride from thread to thread, at least `scratch_bytes` (a number)
    11 cap: scaled scores become ``cap * tanh(score / cap)``; cap * log2(e), or 0 for none (a number
       from `word_of_float`)
    12 sinks: weights [num_heads], each the score of a key without a value, or 0 for none
    13 memory for the states of splits, `split_states_bytes`
    14 ends: int64 [tokens], the position behind the last one that each token attends to, at most
       the length of its request; those of a request's tokens never decrease. 0: each attends to its
       own position and none behind it
    15 biases: float32 [num_heads, 2 * n - 1] with n above every position, the address of the first
       head's for distance 0; each is added to the scores of keys that are so many positions ahead
       of a token. Or, if they are those of each token, float32 [tokens, num_heads, n], by the
       position of the key. 0: there are none
    16 their stride from head to head (a number)
    17 their stride from token to token (a number), or 0 if they are the same for all tokens
"""

MERGE_SPLITS = {
    (stored, kind): Kernel(_count_merges, _merge_splits, at.dtype_of(stored), kind)
    for stored, kind in [*at.KINDS, *at.TILE_KINDS]
}
"""Kernels by the same names, which run after ATTEND and write the output of requests whose splits
were pieces of their own. They have the same operands."""
