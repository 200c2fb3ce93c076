"""An indexer's kernels: they store the index keys of a step's tokens, and choose which tokens each
token attends to.

A choice is a row of slots, in the order of positions: `latent_attention` reads it in place of a row
of the block table. `reference.indexer` has the formulas. This module must not know what attends.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmllm_kernels.cpu.attention_state import cache_lines
from shmllm_kernels.cpu.heads import rotate
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.latent_attention import (
    CHUNK_KEYS,
    KEYS_IN_TABLE,
    SCORES_STRIDE,
    find_keys,
    score_rows,
    sizes_at,
)
from shmllm_kernels.cpu.latent_layout import DTYPES, LatentLayout, padded, put_row
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    number,
    put_word,
    short_words,
    word,
)
from shmllm_kernels.cpu.norms import mean_of, variance_of
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece

KINDS = [(stored, dtype) for stored in DTYPES for dtype in DTYPES]
"""The dtype names of the cache and of the norm's weights that kernels exist for."""

DIGITS = 256
"""The radix of the search for the last chosen score."""


def index_words(layout: LatentLayout, num_heads: int, block_stride: int) -> NDArray[np.int64]:
    """Returns the sizes of an indexer's layer, for the kernels.

    Args:
        layout: the layout of its cache.
        num_heads: the number of the indexer's heads.
        block_stride: the bytes from one block of the layer to the next.
    """
    dim = layout.index_dim
    widths = [dim, dim, padded(dim), padded(dim)]
    shift = layout.block_size.bit_length() - 1
    words = [num_heads, *widths, layout.row_bytes, shift, 0, block_stride, 0]
    return np.array(words, np.int64)


def scratch_bytes(layout: LatentLayout, num_heads: int, max_positions: int) -> int:
    """Returns the size of one thread's scratch memory."""
    sizes = [4 * num_heads * padded(layout.index_dim), num_heads * SCORES_STRIDE]
    sizes += [8 * KEYS_IN_TABLE, 8 * DIGITS, 4 * (max_positions + CHUNK_KEYS)]
    return sum(map(cache_lines, sizes))


@compiled
def _store(operands, piece, thread, num_threads, stored, kind):
    x, stride, dim = word(operands, 1), word(operands, 2), word(operands, 3)
    num_pairs, is_interleaved = word(operands, 4), word(operands, 5)
    weight, bias, eps = word(operands, 8), word(operands, 9), float_of_word(word(operands, 10))
    slots, cache, row_bytes = word(operands, 11), word(operands, 12), word(operands, 13)
    shift, block_stride = word(operands, 14), word(operands, 15)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        row = x + token * stride
        values = floats(row)
        mean = mean_of(row, dim)
        scale = np.float32(1.0) / np.sqrt(variance_of(row, dim, mean) + eps)
        for i in range(dim):
            values[i] = (values[i] - mean) * scale * number(weight, i, kind) + number(bias, i, kind)
        cos = word(operands, 6) + token * num_pairs * 4
        sin = word(operands, 7) + token * num_pairs * 4
        rotate(row, num_pairs, is_interleaved, cos, sin)
        slot = word(slots, token)
        place = cache + (slot >> shift) * block_stride + (slot & ((1 << shift) - 1)) * row_bytes
        put_row(place, row, dim, stored)


STORE_INDEX_KEYS = {kinds: Kernel(count_pieces, _store, *kinds) for kinds in KINDS}
"""Kernels by the dtype names of the cache and of the norm's weights. They normalise keys
(LayerNorm) and rotate their first elements, both in place, and write them to the cache.

Operands (addresses; strides in bytes):

    0  the address of the number of tokens
    1  x: float32 rows, a key each
    2  the stride of x, and 3 the width of a key (numbers)
    4  the number of pairs that rotate, and 5 how: see `latents.ROTATE` (numbers)
    6  cos, 7  sin: float32 [tokens, pairs], of the tokens' positions
    8  the norm's weight and 9 its bias [width], and 10 its eps, a number from `word_of_float`
    11 slots: int64 [tokens], block * block_size + offset
    12 the first index key of the layer's cache, see `LatentLayout`
    13 row_bytes, 14 log2 of the block size, 15 the stride from block to block (numbers)
"""


@compiled
def pieces_of_step(operands, piece, thread, num_threads):
    """Returns the number of pieces of a kernel whose first operand is a step: one a token."""
    return word(word(operands, 0), 0)


@compiled
def blocks_of(step, requests, token):
    """Returns the address of the row of the block table of a token's request."""
    firsts = word(requests, 0)
    request, end = 0, word(step, 1)
    while end - request > 1:
        middle = (request + end) // 2
        if word(firsts, middle) <= token:
            request = middle
        else:
            end = middle
    return word(requests, 4) + word(word(requests, 3), request) * word(requests, 5) * 4


@compiled
def _load_queries(operands, token, sizes, target):
    """Rotates a token's queries, and copies them, padded as the keys are."""
    source, head_bytes = word(operands, 3) + token * word(operands, 4), 4 * sizes.key_dim
    num_pairs, is_interleaved = word(operands, 13), word(operands, 14)
    cos = word(operands, 15) + token * num_pairs * 4
    sin = word(operands, 16) + token * num_pairs * 4
    for head in range(sizes.num_heads):
        row = source + head * head_bytes
        rotate(row, num_pairs, is_interleaved, cos, sin)
        values, copy = floats(row), floats(target + 4 * head * sizes.width)
        for i in range(sizes.key_dim):
            copy[i] = values[i]
        for i in range(sizes.key_dim, sizes.width):
            copy[i] = np.float32(0.0)


@compiled
def add_heads(scores, count, num_heads, weights, out):
    """Adds up the weighted positive scores of all heads, in their order."""
    total, factors = floats(out), floats(weights)
    for i in range(count):
        total[i] = np.float32(0.0)
    for head in range(num_heads):
        row, factor = floats(scores + head * SCORES_STRIDE), factors[head]
        for i in range(count):
            total[i] += factor * max(row[i], np.float32(0.0))


@compiled
def rank_of(scores, index):
    """Returns a number from 0 to 2**32 in the order of the scores; both zeros have one."""
    bits = np.int64(short_words(scores)[index])
    magnitude = bits & 0x7FFFFFFF
    return (magnitude if bits >= 0 else -magnitude) + 0x80000000


@compiled
def find_last_rank(scores, count, top_k, digits):
    """Finds the score with which as many as wanted are chosen, digit by digit.

    Returns:
        Its `rank_of`, and how many of the scores that have it are chosen.
    """
    found, left, shift = 0, top_k, 24
    while shift >= 0:
        for digit in range(DIGITS):
            put_word(digits, digit, 0)
        for i in range(count):
            rank = rank_of(scores, i)
            if rank >> (shift + 8) == found:
                digit = (rank >> shift) & (DIGITS - 1)
                put_word(digits, digit, word(digits, digit) + 1)
        digit = DIGITS - 1
        while word(digits, digit) < left:
            left -= word(digits, digit)
            digit -= 1
        found = found * DIGITS + digit
        shift -= 8
    return found, left


@compiled
def _slot(table, sizes, position):
    """Returns the slot of a position, block * block_size + offset."""
    block = np.int64(short_words(table)[position >> sizes.block_shift])
    return np.int32((block << sizes.block_shift) + (position & ((1 << sizes.block_shift) - 1)))


@compiled
def _choose(operands, token, thread, num_threads, kind):
    sizes, top_k = sizes_at(word(operands, 2)), word(operands, 10)
    table = blocks_of(word(operands, 0), word(operands, 1), token)
    count = word(word(operands, 7), token) + 1
    chosen = short_words(word(operands, 9) + 4 * token * top_k)
    if count <= top_k:
        for position in range(count):
            chosen[position] = _slot(table, sizes, position)
        return
    query = word(operands, 11) + thread * word(operands, 12)
    chunk = query + cache_lines(4 * sizes.num_heads * sizes.width)
    keys = chunk + cache_lines(sizes.num_heads * SCORES_STRIDE)
    digits = keys + cache_lines(8 * KEYS_IN_TABLE)
    scores = digits + cache_lines(8 * DIGITS)
    _load_queries(operands, token, sizes, query)
    weights = word(operands, 5) + token * word(operands, 6)
    for first in range(0, count, CHUNK_KEYS):
        size = min(count - first, CHUNK_KEYS)
        find_keys(keys, word(operands, 8), sizes, table, first, count - 1)
        score_rows(query, 4 * sizes.width, keys, size, sizes.width, sizes.num_heads, chunk, kind)
        add_heads(chunk, size, sizes.num_heads, weights, scores + 4 * first)
    last, left = find_last_rank(scores, count, top_k, digits)
    found = 0
    for position in range(count):
        rank = rank_of(scores, position)
        is_last = rank == last and left > 0
        if rank > last or is_last:
            chosen[found] = _slot(table, sizes, position)
            found += 1
        if is_last:
            left -= 1


CHOOSE_TOKENS = {kind: Kernel(pieces_of_step, _choose, kind) for kind in DTYPES}
"""Kernels by the dtype name of the cache. They choose the tokens that each token attends to among
its own and those before it: all if there are few, or those with the largest scores, of equal ones
the first.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `attention_pieces.request_words`
    2  sizes: words, see `index_words`
    3  queries: float32 rows, [num_heads, width]; rotated in place
    4  their stride (a number)
    5  the weights of heads: float32 rows, [num_heads]
    6  their stride (a number)
    7  positions: int64 [tokens]
    8  the first index key of the layer's cache, see `LatentLayout`
    9  out: int32 [tokens, top_k], the slots of the chosen tokens, block * block_size + offset
    10 top_k (a number)
    11 scratch memory of the first thread
    12 its stride from thread to thread, at least `scratch_bytes` (a number)
    13 the number of pairs that rotate, and 14 how: see `latents.ROTATE` (numbers)
    15 cos, 16  sin: float32 [tokens, pairs], of the tokens' positions
"""
