"""Where the keys and values that a tile of queries sees lie: from block tables to addresses.

Must not know what is done with them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_tiles import KEY_VECTORS
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize, put_word, short_words, word
from shmllm_kernels.cpu.simd import LANES


class Tile(NamedTuple):
    """Some queries of one request, with one head of keys and values. All int64."""

    first_token: int
    first_position: int
    num_queries: int
    kv_head: int
    blocks: int  # address of the request's block table
    first_key: int  # that any of the queries sees
    last_key: int


@compiled
def _find_values(target, cache, heads, tile, kv_head, first_vector):
    """Where the values of a stretch lie, by vectors of keys. Those behind the last key are
    taken to be the last vector's."""
    shift = word(heads, at.VECTOR_SHIFT)
    last_vector = tile.last_key // word(heads, at.KEYS_PER_VECTOR)
    blocks = short_words(tile.blocks)
    base = cache + kv_head * word(heads, at.HEAD_BYTES) + word(heads, at.KEY_BYTES)
    for i in range(KEY_VECTORS):
        vector = min(first_vector + i, last_vector)
        block = base + np.int64(blocks[vector >> shift]) * word(heads, at.BLOCK_BYTES)
        part = vector & ((1 << shift) - 1)
        put_word(target, i, block + part * LANES * word(heads, at.VALUE_ROW_BYTES))


@compiled
def find_stretch(keys, values, cache, heads, tile, first_vector, kind):
    """Fill tables of addresses: of a stretch's keys, by vectors; of its values, and behind them of
    what is needed next."""
    _find_values(values, cache, heads, tile, tile.kv_head, first_vector)
    back = -word(heads, at.KEY_BYTES)
    mask = (1 << word(heads, at.VECTOR_SHIFT)) - 1
    last_vector = tile.last_key // word(heads, at.KEYS_PER_VECTOR)
    row_bytes, vector_bytes = word(heads, at.VALUE_ROW_BYTES), LANES * itemsize(kind)
    for i in range(KEY_VECTORS):
        part = min(first_vector + i, last_vector) & mask
        place = word(values, i)
        put_word(keys, i, place + back - part * (LANES * row_bytes - vector_bytes))
    following, kv_head = first_vector + KEY_VECTORS, tile.kv_head
    if following > last_vector:  # the next piece is most likely the next head
        following = tile.first_key // (KEY_VECTORS * word(heads, at.KEYS_PER_VECTOR)) * KEY_VECTORS
        kv_head += 1
    ahead = values + 8 * KEY_VECTORS
    _find_values(ahead, cache, heads, tile, kv_head, following)
