"""The pieces of work of attention: tiles of one request's queries, or splits of the context of a
single query, each with one key-value head.

This module must not know how a piece is computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_blocks import QueryTile
from shmllm_kernels.cpu.attention_state import SPLIT_KEYS
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.windows import first_visible

ROWS_PER_TILE = 48
"""The largest number of query rows in a tile, which share a chunk of keys while it is in the L1 and
L2 caches."""

MAX_SPLITS = 1024
"""The largest number of splits in a step that are pieces of their own."""


@compiled
def queries_per_tile(heads_per_kv: int) -> int:
    """Returns the largest number of a request's queries in one tile."""
    return max(ROWS_PER_TILE // heads_per_kv, 1)


def count_pieces(
    counts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    heads_per_kv: int,
    tiles: NDArray[np.int64],
    splits: NDArray[np.int64],
    split_keys: int = SPLIT_KEYS,
) -> None:
    """Divides the requests of a step into pieces for one key-value head: tiles of queries, or
    splits of the context of a single query.

    Args:
        counts: [requests], the number of each request's tokens in the step.
        context_lens: [requests], the position of its last token, plus one.
        heads_per_kv: the number of query heads that share a key-value head.
        tiles: [requests + 1]; gets the number of pieces before each request, and the total.
        splits: [requests + 1]; gets the index of each request's first split among all splits, or
            -1 if its pieces are tiles, and at the end the number of requests with splits.
        split_keys: the number of positions in a split.
    """
    queries, size = queries_per_tile(heads_per_kv), len(counts)
    of_context = -(-context_lens // split_keys)
    of_context[(counts != 1) | (of_context < 2)] = 0
    ends = np.cumsum(of_context)
    has_splits = (of_context > 0) & (ends <= MAX_SPLITS)
    splits[:size] = np.where(has_splits, ends - of_context, -1)
    splits[size] = np.count_nonzero(has_splits)
    tiles[0] = 0
    np.cumsum(np.where(has_splits, of_context, -(-counts // queries)), out=tiles[1 : size + 1])


@compiled
def num_pieces(operands, piece, thread, num_threads):
    """Returns the number of pieces of ATTEND."""
    num_requests = word(word(operands, 0), 1)
    return word(word(word(operands, 1), 6), num_requests) * word(word(operands, 2), at.NUM_KV_HEADS)


@compiled
def find_tile(step, requests, heads, window, ends, piece):
    """Returns the tile of queries of a piece."""
    num_kv_heads = word(heads, at.NUM_KV_HEADS)
    index, kv_head = piece // num_kv_heads, piece % num_kv_heads
    before = word(requests, 6)
    request, end = 0, word(step, 1)
    while end - request > 1:
        middle = (request + end) // 2
        if word(before, middle) <= index:
            request = middle
        else:
            end = middle
    index -= word(before, request)
    has_splits = word(word(requests, 7), request) >= 0
    per_tile = queries_per_tile(word(heads, at.NUM_HEADS) // num_kv_heads)
    first = 0 if has_splits else index * per_tile
    count = word(word(requests, 1), request)
    num_queries = min(per_tile, count - first)
    position = word(word(requests, 2), request) - count + first
    first_token = word(word(requests, 0), request) + first
    first_key = first_visible(position, window)
    last_key = position + num_queries - 1
    if ends != 0:
        ends += 8 * first_token
        last_key = word(ends, num_queries - 1) - 1
    return QueryTile(
        first_token,
        position,
        num_queries,
        kv_head,
        word(requests, 4)
        + word(word(requests, 3), request) * word(requests, 5) * 4
        + kv_head * word(requests, 8),
        max(first_key, index * SPLIT_KEYS) if has_splits else first_key,
        min(last_key, (index + 1) * SPLIT_KEYS - 1) if has_splits else last_key,
        word(word(requests, 7), request) + index if has_splits else -1,
        ends,
    )


@compiled
def biases_of(operands, tile, per_kv):
    """Returns the address of the bias of position 0 for a tile's first query and head; 0: none."""
    first, step = word(operands, 15), word(operands, 17)
    of_head = first + tile.kv_head * per_kv * word(operands, 16)
    by_distance = of_head - 4 * tile.first_position
    own = of_head + tile.first_token * step if step != 0 else by_distance
    return own if first != 0 else 0


@compiled
def biases_step(operands):
    """Returns the bytes from the bias of a position for a query to that for the next query."""
    return word(operands, 17) if word(operands, 17) != 0 else -4


def request_words(
    first_tokens: int,
    counts: int,
    context_lens: int,
    rows: int,
    block_table: int,
    max_blocks: int,
    tiles: int,
    splits: int,
    head_bytes: int = 0,
) -> NDArray[np.int64]:
    """Returns the description of a step's requests for `attention.ATTEND`.

    Args:
        first_tokens: address of int64 [requests]: the index of each request's first token in the
            step.
        counts: address of int64 [requests]: the number of each request's tokens in the step.
        context_lens: address of int64 [requests]: the position of its last token, plus one.
        rows: address of int64 [requests]: the rows of the block table.
        block_table: address of int32 [rows, max_blocks].
        max_blocks: the number of columns of the block table.
        tiles, splits: addresses of int64 [requests + 1], which `count_pieces` filled.
        head_bytes: from what a row has for a key-value head to what it has for the next, in bytes;
            0: all have the same blocks.
    """
    words = first_tokens, counts, context_lens, rows, block_table, max_blocks, tiles, splits
    return np.array([*words, head_bytes], np.int64)
