"""The kernel that lists what each token attends to in a compressed attention: the addresses of its
window's keys, and of entries, all or those that an indexer chooses.

`latent_attention` reads a list in place of a row of the block table. This module must not know how
keys and entries are made, which is the task of `compression`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu.attention_state import cache_lines
from shmllm_kernels.cpu.compression import entry_at, pages_at, row_at
from shmllm_kernels.cpu.indexer import (
    DIGITS,
    add_heads,
    blocks_of,
    find_last_rank,
    pieces_of_step,
    rank_of,
)
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.latent_attention import (
    CHUNK_KEYS,
    KEYS_IN_TABLE,
    SCORES_STRIDE,
    score_rows,
)
from shmllm_kernels.cpu.latent_layout import DTYPES
from shmllm_kernels.cpu.memory import floats, put_word, word


class Lists(NamedTuple):
    """What a list consists of. All fields are int64."""

    window: int  # the number of positions of a window, the token's own included
    rate: int  # the number of tokens of an entry; 0: there are no entries
    top_k: int  # how many are chosen at most; 0: all are read
    index_offset: int  # where the key of an indexer begins in an entry
    num_heads: int  # of the indexer
    dim: int  # the width of such a key
    width: int  # the same, padded


@compiled
def _load_queries(source, lists, target):
    """Copies a token's index queries, padded as keys are."""
    for head in range(lists.num_heads):
        values = floats(source + 4 * head * lists.dim)
        copy = floats(target + 4 * head * lists.width)
        for i in range(lists.dim):
            copy[i] = values[i]
        for i in range(lists.dim, lists.width):
            copy[i] = np.float32(0.0)


@compiled
def _score(operands, token, lists, pages, blocks, count, scratch, kind):
    """Computes the scores of all entries of a token; returns their address, and that of memory for
    digits."""
    chunk = scratch + cache_lines(4 * lists.num_heads * lists.width)
    keys = chunk + cache_lines(lists.num_heads * SCORES_STRIDE)
    digits = keys + cache_lines(8 * KEYS_IN_TABLE)
    scores = digits + cache_lines(8 * DIGITS)
    _load_queries(word(operands, 7) + token * word(operands, 8), lists, scratch)
    weights = word(operands, 9) + token * word(operands, 10)
    for first in range(0, count, CHUNK_KEYS):
        size = min(count - first, CHUNK_KEYS)
        for i in range(KEYS_IN_TABLE):
            entry = entry_at(pages, blocks, lists.rate, min(first + i, count - 1))
            put_word(keys, i, entry + lists.index_offset)
        score_rows(scratch, 4 * lists.width, keys, size, lists.width, lists.num_heads, chunk, kind)
        add_heads(chunk, size, lists.num_heads, weights, scores + 4 * first)
    return scores, digits


@compiled
def _list(operands, token, thread, num_threads, kind):
    step, position, words = word(operands, 0), word(word(operands, 2), token), word(operands, 6)
    lists = Lists(
        word(words, 0), word(words, 1), word(words, 2), word(words, 3), word(words, 4),
        word(words, 5), word(words, 6),
    )  # fmt: skip
    out, found = word(operands, 13) + token * word(operands, 14), np.int64(0)
    blocks, pages = blocks_of(step, word(operands, 1), token), pages_at(word(operands, 3))
    for at in range(max(position + 1 - lists.window, 0), position + 1):
        put_word(out, found, row_at(pages, blocks, at))
        found += 1
    if lists.rate == 0:
        return
    count = (position + 1) // lists.rate
    entries = blocks_of(step, word(operands, 4), token)
    of_entries = pages_at(word(operands, 5))
    if lists.top_k == 0 or count <= lists.top_k:
        for entry in range(count):
            put_word(out, found, entry_at(of_entries, entries, lists.rate, entry))
            found += 1
        return
    scratch = word(operands, 11) + thread * word(operands, 12)
    scores, digits = _score(operands, token, lists, of_entries, entries, count, scratch, kind)
    last, left = find_last_rank(scores, count, lists.top_k, digits)
    for entry in range(count):
        rank = rank_of(scores, entry)
        is_last = rank == last and left > 0
        if rank > last or is_last:
            put_word(out, found, entry_at(of_entries, entries, lists.rate, entry))
            found += 1
        if is_last:
            left -= 1


LIST_KEYS = {kind: Kernel(pieces_of_step, _list, kind) for kind in DTYPES}
"""Kernels by the dtype name of the cache. They list the addresses of what each token attends to: of
the keys of its window, in the order of positions, and of the entries of all windows that end with
it or before: all, or those with the largest scores, of equal ones the first.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `attention_pieces.request_words`, with the block table of rows
    2  positions: int64 [tokens]
    3  `Pages` of the rows of tokens
    4  requests: as 1, with the block table of entries; 0: there are none
    5  `Pages` of the entries, 0 likewise
    6  words: those of `Lists`
    7  index queries: float32 rows, [num_heads, dim], rotated; 8 their stride (a number)
    9  the weights of heads: float32 rows, [num_heads]; 10 their stride (a number)
    11 scratch memory of the first thread; 12 its stride from thread to thread, at least
       `indexer.scratch_bytes` (a number)
    13 out: int64 rows; 14 their stride (a number)
"""
