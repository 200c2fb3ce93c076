"""Finds the addresses of the keys and values that a tile of queries needs, from a block table.

This module must not know how attention uses them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_tiles import KEY_VECTORS
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize, put_word, short_words, word
from shmllm_kernels.cpu.simd import LANES


class QueryTile(NamedTuple):
    """Consecutive queries of one request, for one key-value head. All fields are int64."""

    first_token: int  # index in the step
    first_position: int
    num_queries: int
    kv_head: int
    blocks: int  # address of the request's row of the block table
    first_key: int  # the first and the last position that any of the queries attends to
    last_key: int
    split: int  # if the tile is one split of a context: its index in the step; else -1
    ends: int  # address of the ends of the keys that the queries see; 0: none behind its position


@compiled
def _find_values(target, cache, heads, tile, kv_head, first_vector):
    """Writes the addresses of the values that belong to the vectors of a chunk of keys. Vectors
    after the last key get the address of the last one."""
    shift = word(heads, at.VECTOR_SHIFT)
    last_vector = tile.last_key // word(heads, at.KEYS_PER_VECTOR)
    blocks = short_words(tile.blocks)
    base = cache + kv_head * word(heads, at.HEAD_BYTES) + word(heads, at.KEY_BYTES)
    for i in range(KEY_VECTORS):
        vector = min(first_vector + i, last_vector)
        block = base + np.int64(blocks[vector >> shift]) * word(heads, at.BLOCK_STRIDE)
        part = vector & ((1 << shift) - 1)
        put_word(target, i, block + part * LANES * word(heads, at.VALUE_ROW_BYTES))


@compiled
def find_key_chunk(keys, values, scales, cache, heads, tile, first_vector, kind):
    """Writes tables of addresses for a chunk of keys, with one entry for each vector.

    Args:
        keys: address of the table of keys' addresses.
        values: address of the table of values' addresses; the values of the chunk that follows are
            appended, for prefetching.
        scales: address of the table of addresses of the keys' scales; unused but for int8.
    """
    _find_values(values, cache, heads, tile, tile.kv_head, first_vector)
    back = -word(heads, at.KEY_BYTES)
    mask = (1 << word(heads, at.VECTOR_SHIFT)) - 1
    last_vector = tile.last_key // word(heads, at.KEYS_PER_VECTOR)
    row_bytes, vector_bytes = word(heads, at.VALUE_ROW_BYTES), LANES * itemsize(kind)
    for i in range(KEY_VECTORS):
        part = min(first_vector + i, last_vector) & mask
        address = word(values, i)
        block = address + back - part * (LANES * row_bytes)
        put_word(keys, i, block + part * vector_bytes)
        if kind == "int8":
            put_word(scales, i, block + word(heads, at.SCALES_AT) + part * LANES * 4)
    following, kv_head = first_vector + KEY_VECTORS, tile.kv_head
    if following > last_vector:  # the next piece of work is most likely the next head
        following = tile.first_key // (KEY_VECTORS * word(heads, at.KEYS_PER_VECTOR)) * KEY_VECTORS
        kv_head += 1
    ahead = values + 8 * KEY_VECTORS
    _find_values(ahead, cache, heads, tile, kv_head, following)
