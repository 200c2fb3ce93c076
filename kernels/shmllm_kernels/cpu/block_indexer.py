"""The kernel of an indexer of an attention of heads: it chooses which blocks of keys each token
attends to, for each key-value head.

A choice is a row of a block table for each key-value head, with the blocks of the cache in the
order of positions: `attention` reads it in place of that of a request. `heads.STORE_HEADS` stores
the keys, those of a head without values. `reference.indexer` has the formulas. This module must not
know what attends.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_blocks import QueryTile, find_key_chunk
from shmllm_kernels.cpu.attention_rows import SCORE_GROUP
from shmllm_kernels.cpu.attention_state import cache_lines
from shmllm_kernels.cpu.attention_tiles import KEY_VECTORS, SCORES_STRIDE
from shmllm_kernels.cpu.cache_layout import CacheLayout
from shmllm_kernels.cpu.indexer import DIGITS, blocks_of, find_last_rank, pieces_of_step, rank_of
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, short_words, word
from shmllm_kernels.cpu.simd import LANES

_score_four, _score_two, _score_one = (SCORE_GROUP[size] for size in (4, 2, 1))
_LARGEST = 3e38


def scratch_bytes(layout: CacheLayout, num_heads: int, max_blocks: int) -> int:
    """Returns the size of one thread's scratch memory.

    Args:
        layout: the layout of the indexer's keys.
        num_heads: the number of the indexer's heads.
        max_blocks: the most blocks of the cache that a request has.
    """
    sizes = [4 * num_heads * layout.head_dim, num_heads * SCORES_STRIDE, 8 * KEY_VECTORS]
    sizes += [16 * KEY_VECTORS, 8 * DIGITS, 4 * num_heads * max_blocks]
    return sum(map(cache_lines, sizes))


@compiled
def _group_size(rows_left):
    """Returns the number of heads that are scored at a time."""
    if rows_left >= 4:
        return 4
    return 2 if rows_left >= 2 else 1


@compiled
def _load_queries(source, num_heads, dim, target):
    """Copies a token's queries, with the heads of each group side by side."""
    row = 0
    while row < num_heads:
        size = _group_size(num_heads - row)
        packed = floats(target + 4 * row * dim)
        for i in range(size):
            query = floats(source + 4 * (row + i) * dim)
            for j in range(dim):
                packed[j * size + i] = query[j]
        row += size


@compiled
def _score_heads(query, keys, heads, end, scores, kind):
    """Computes the scores of all heads with the first `end` vectors of a chunk of keys."""
    num_heads, dim = word(heads, at.NUM_HEADS), word(heads, at.HEAD_DIM)
    stride, behind = word(heads, at.DIMENSION_BYTES), word(heads, at.KEY_BYTES)
    row = 0
    while row < num_heads:
        size = _group_size(num_heads - row)
        own, out = query + 4 * row * dim, scores + row * SCORES_STRIDE
        if size == 4:
            _score_four(own, out, keys, stride, dim, behind, 0, end, kind)
        elif size == 2:
            _score_two(own, out, keys, stride, dim, behind, 0, end, kind)
        else:
            _score_one(own, out, keys, stride, dim, behind, 0, end, kind)
        row += size


@compiled
def _raise_block(scores, num_keys, key, size, best):
    """Raises the score of the block that begins at, or before, a key, to the largest of those of
    some keys in it, the first of which is the key."""
    own, of_blocks = floats(scores), floats(best)
    largest = own[0]
    for i in range(1, num_keys):
        largest = max(largest, own[i])
    block = key // size
    of_blocks[block] = largest if key % size == 0 else max(of_blocks[block], largest)


@compiled
def _score_blocks(operands, token, scratch, table, last, best, best_bytes, kind):
    """Computes the scores of all blocks up to the one of the position `last`, for all heads."""
    heads, size = word(operands, 2), word(operands, 9)
    num_heads, dim = word(heads, at.NUM_HEADS), word(heads, at.HEAD_DIM)
    per_vector = word(heads, at.KEYS_PER_VECTOR)
    scores = scratch + cache_lines(4 * num_heads * dim)
    keys = scores + num_heads * SCORES_STRIDE
    values = keys + cache_lines(8 * KEY_VECTORS)
    _load_queries(word(operands, 3) + token * word(operands, 4), num_heads, dim, scratch)
    tile = QueryTile(token, last, 1, 0, table, 0, last, -1, 0)
    vector = 0
    while vector * per_vector <= last:
        find_key_chunk(keys, values, 0, word(operands, 6), heads, tile, vector, kind)
        end = min(last // per_vector + 1 - vector, KEY_VECTORS)
        _score_heads(scratch, keys, heads, end, scores, kind)
        for head in range(num_heads):
            row = scores + head * SCORES_STRIDE
            for i in range(end):
                key = (vector + i) * per_vector
                num_keys = min(per_vector, last + 1 - key)
                _raise_block(row + 4 * LANES * i, num_keys, key, size, best + head * best_bytes)
        vector += KEY_VECTORS


@compiled
def _put_blocks(target, found, table, block, per_block, last):
    """Copies the entries of a chosen block, of which `last` is the last entry of the table that has
    keys; returns the number of those that the target has then."""
    chosen, entries = short_words(target), short_words(table)
    first = block * per_block
    for entry in range(first, min(first + per_block, last + 1)):
        chosen[found] = entries[entry]
        found += 1
    return found


@compiled
def _choose_of_head(best, count, top_k, digits, target, table, per_block, last):
    """Writes the blocks that a head has chosen among `count`."""
    least, left = find_last_rank(best, count, top_k, digits)
    found = 0
    for block in range(count):
        rank = rank_of(best, block)
        is_last = rank == least and left > 0
        if rank > least or is_last:
            found = _put_blocks(target, found, table, block, per_block, last)
        if is_last:
            left -= 1


@compiled
def _choose(operands, token, thread, num_threads, kind):
    heads, top_k, size = word(operands, 2), word(operands, 8), word(operands, 9)
    num_heads, dim = word(heads, at.NUM_HEADS), word(heads, at.HEAD_DIM)
    table = blocks_of(word(operands, 0), word(operands, 1), token)
    shift = word(heads, at.BLOCK_SHIFT)
    per_block, position = size >> shift, word(word(operands, 5), token)
    count, last = position // size + 1, position >> shift
    row_bytes = 4 * top_k * per_block
    target = word(operands, 7) + token * num_heads * row_bytes
    if count <= top_k:
        for head in range(num_heads):
            _put_blocks(target + head * row_bytes, 0, table, 0, last + 1, last)
        return
    scratch = word(operands, 11) + thread * word(operands, 12)
    digits = scratch + cache_lines(4 * num_heads * dim) + num_heads * SCORES_STRIDE
    digits += cache_lines(8 * KEY_VECTORS) + cache_lines(16 * KEY_VECTORS)
    best, best_bytes = digits + 8 * DIGITS, 4 * word(word(operands, 1), 5)
    _score_blocks(operands, token, scratch, table, position, best, best_bytes, kind)
    for head in range(num_heads):
        own = best + head * best_bytes
        of_blocks = floats(own)
        for block in range(max(count - word(operands, 10), 0), count):
            of_blocks[block] = np.float32(_LARGEST)
        own_target = target + head * row_bytes
        _choose_of_head(own, count, top_k, digits, own_target, table, per_block, last)


CHOOSE_BLOCKS = {kind: Kernel(pieces_of_step, _choose, kind) for kind in at.DTYPES}
"""Kernels by the dtype name of the keys. They choose the blocks of keys that each token attends to,
among that of its own position and those before it: all if there are few, or those with the largest
scores of a key up to that position, of equal ones the first. Those next to the token are always
among them.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `attention_pieces.request_words`
    2  heads: words, see `cache_layout.head_words`, of the layout of the keys
    3  queries: float32 rows, [num_heads, width], normalised and rotated
    4  their stride (a number)
    5  positions: int64 [tokens]
    6  the first index key of the layer's cache, see `CacheLayout.index_offset`
    7  out: int32 [tokens, num_heads, top_k * blocks of the cache in a block], of which the first
       are written
    8  top_k (a number)
    9  the number of keys of a block, a multiple of that of a block of the cache (a number)
    10 how many of the last blocks are always chosen, from 1 to top_k (a number)
    11 scratch memory of the first thread
    12 its stride from thread to thread, at least `scratch_bytes` (a number)
"""
