"""A piece of attention by tile instructions: its scratch memory, and where the tiles of keys and
values are that it needs, from a block table.

This module must not know how attention uses them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_blocks import QueryTile
from shmllm_kernels.cpu.attention_matrix_tiles import (
    CHUNK_TILES,
    ROWS,
    SCORES_STRIDE,
    TILES_AT_ONCE,
    WEIGHTS_STRIDE,
)
from shmllm_kernels.cpu.attention_pieces import queries_per_tile
from shmllm_kernels.cpu.attention_state import cache_lines, state_bytes
from shmllm_kernels.cpu.bfloat16 import store_bits
from shmllm_kernels.cpu.cache_layout import TILE_DIMS, TILE_KEYS, CacheLayout
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import put_word, short_words, word
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop
from shmllm_kernels.cpu.tile_instructions import LINE_BYTES


class Scratch(NamedTuple):
    """The addresses of the parts of a thread's scratch memory."""

    total: int  # the state after all splits
    state: int  # the state of a split
    query: int  # [rows, head_dim padded to whole steps] bfloat16
    scores: int  # [rows, CHUNK_KEYS] float32
    weights: int  # [rows, CHUNK_KEYS] bfloat16
    factors: int  # [rows] float32
    sums: int  # [ROWS, padded] float32, the weighted values of a chunk
    keys: int  # table of the addresses of a chunk's tiles of keys
    values: int  # table of the addresses of their values
    keys_ahead: int  # table of the addresses of tiles of keys to prefetch
    values_ahead: int  # table of the addresses of their values
    copy: int  # the values of the last tile of keys, without those that nobody sees
    sizes: int  # the configuration of the tiles


class Job(NamedTuple):
    """A piece of work. Strides are in bytes.

    tiles: the instructions.
    tile: the queries.
    following: those of the piece that this thread most likely does next.
    scratch: the memory.
    heads, cache: see `attention.ATTEND`.
    rows: the number of query rows.
    per_kv: the number of query heads that share a key-value head.
    padded: the number of dimensions of the values, padded.
    key_line, value_line: from one pair of dimensions, or of values, to the next.
    num_steps: the number of steps of TILE_DIMS dimensions.
    window: see `windows.window_number`.
    cap: of scores, multiplied by log2(e); 0: none.
    biases, biases_stride, biases_step: see `attention_rows.KeyChunk`.
    """

    tiles: Any
    tile: QueryTile
    following: QueryTile
    scratch: Scratch
    heads: Any
    cache: Any
    rows: Any
    per_kv: Any
    padded: Any
    key_line: Any
    value_line: Any
    num_steps: Any
    window: Any
    cap: Any
    biases: Any
    biases_stride: Any
    biases_step: Any


@compiled
def whole_rows(rows):
    """Returns the number of rows of products."""
    return rows if rows < ROWS else (rows + ROWS - 1) // ROWS * ROWS


def scratch_bytes_in_tiles(layout: CacheLayout, num_heads: int) -> int:
    """Returns the size of one thread's scratch memory."""
    per_kv = num_heads // layout.num_kv_heads
    rows = queries_per_tile(per_kv) * per_kv
    key_dims, padded = layout.keys_shape[0], layout.values_shape[1]
    sizes = [*[state_bytes(rows, padded)] * 2, 2 * whole_rows(rows) * key_dims]
    whole = (rows + ROWS - 1) // ROWS * ROWS
    sizes += [whole * SCORES_STRIDE, whole * WEIGHTS_STRIDE, 4 * whole, 4 * ROWS * padded]
    sizes += [*[8 * CHUNK_TILES] * 4, 2 * TILE_KEYS * padded, 64]
    return sum(map(cache_lines, sizes))


@compiled
def divide_scratch(address, rows, padded, query_bytes):
    """Returns the parts of a thread's scratch memory."""
    state = address + state_bytes(rows, padded)
    query = state + state_bytes(rows, padded)
    scores = query + cache_lines(query_bytes)
    whole = (rows + ROWS - 1) // ROWS * ROWS
    weights = scores + whole * SCORES_STRIDE
    factors = weights + whole * WEIGHTS_STRIDE
    sums = factors + 4 * whole
    keys = sums + 4 * ROWS * padded
    values = keys + 8 * CHUNK_TILES
    keys_ahead = values + 8 * CHUNK_TILES
    values_ahead = keys_ahead + 8 * CHUNK_TILES
    copy = values_ahead + 8 * CHUNK_TILES
    sizes = copy + 2 * TILE_KEYS * padded
    return Scratch(
        address,
        state,
        query,
        scores,
        weights,
        factors,
        sums,
        keys,
        values,
        keys_ahead,
        values_ahead,
        copy,
        sizes,
    )


@emitted
def _copy_masked(builder, source, mask, num_bytes, out):
    """Copies words, of which only the bits of a mask are kept."""
    e = Emitter(builder)
    masks = builder.bitcast(e.broadcast(builder.bitcast(mask, e.vector.element)), e.integers)
    loop = Loop(e, e.const(0), num_bytes, 4 * LANES)
    loop.begin([])
    words = builder.bitcast(e.load(e.at(source, loop.index)), e.integers)
    store_bits(e, builder.and_(words, masks), e.at(out, loop.index))
    loop.end([])


@compiled
def _copy_seen(values, num_seen, line, out):
    """Copies a tile's values, with zeros in place of those of all keys but the first `num_seen`."""
    for pair in range(TILE_KEYS // 2):
        seen = min(max(num_seen - 2 * pair, 0), 2)
        mask = np.int32((1 << (16 * seen)) - 1)
        _copy_masked(values + pair * line, mask, line, out + pair * line)


@compiled
def _place(job, tile, index):
    """Returns the address of the block of a tile of keys, for a tile of queries, and the index of
    the tile in the block."""
    heads = job.heads
    shift, blocks = word(heads, at.VECTOR_SHIFT), short_words(tile.blocks)
    block = job.cache + np.int64(blocks[index >> shift]) * word(heads, at.BLOCK_STRIDE)
    return block + tile.kv_head * word(heads, at.HEAD_BYTES), index & ((1 << shift) - 1)


@compiled
def _value_bytes(job):
    """Returns the size of the values of a tile of keys."""
    return (TILE_KEYS // 2) * job.value_line


@compiled
def _find_ahead(job, first_tile, last):
    """Writes tables of addresses of what to prefetch with each tile of a chunk: the bytes of that
    which comes a few tiles later, in this piece or in the following one."""
    heads, tile, following, scratch = job.heads, job.tile, job.following, job.scratch
    key_bytes = job.num_steps * (TILE_DIMS // 2) * LINE_BYTES
    begin, end = following.first_key // TILE_KEYS, following.last_key // TILE_KEYS
    for i in range(CHUNK_TILES):
        index = first_tile + TILES_AT_ONCE + i
        is_own = index <= last
        later = QueryTile(
            0, 0, 0, tile.kv_head if is_own else following.kv_head,
            tile.blocks if is_own else following.blocks, 0, 0, 0, 0,
        )  # fmt: skip
        index = index if is_own else min(begin + index - last - 1, end)
        block, part = _place(job, later, index)
        put_word(scratch.keys_ahead, i, block + part * key_bytes)
        values = block + word(heads, at.KEY_BYTES) + part * _value_bytes(job)
        put_word(scratch.values_ahead, i, values)


@compiled
def find_chunk(job, first_tile):
    """Writes tables of addresses for the tiles of a chunk of keys, up to the last one."""
    tile, scratch = job.tile, job.scratch
    last = tile.last_key // TILE_KEYS
    for i in range(min(CHUNK_TILES, last - first_tile + 1)):
        block, part = _place(job, tile, first_tile + i)
        put_word(scratch.keys, i, block + part * LINE_BYTES)
        values = block + word(job.heads, at.KEY_BYTES) + part * _value_bytes(job)
        put_word(scratch.values, i, values)
    if job.rows <= ROWS:
        _find_ahead(job, first_tile, last)
    num_seen = (tile.last_key + 1) % TILE_KEYS
    if num_seen != 0 and last - first_tile < CHUNK_TILES:
        place = last - first_tile
        _copy_seen(word(scratch.values, place), num_seen, job.value_line, scratch.copy)
        put_word(scratch.values, place, scratch.copy)
