"""The kernels of an indexer of an attention of heads: they choose which blocks of keys each token
attends to, for each key-value head.

A choice is a row of a block table for each key-value head, with the blocks of the cache in the
order of positions, which `decode_attention` reads in place of that of a request. `rope_write`
stores the keys, those of a head without values. Tokens with a short context have all of it, and no
scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.choices import chosen_places, least_chosen, place_of
from shmllm_kernels.gpu.configs import next_power_of_two

MOST_KEYS = 64
"""The largest number of keys that a program scores at a time."""
KEYS_PER_PROGRAM = 512
"""About how many keys a program scores."""
SEARCHED = 256
"""The number of scores that a search reads at a time."""
ENTRIES_AT_ONCE = 4096
"""The largest number of entries of the block table that a program copies at a time."""


@triton.jit(do_not_specialize=["num_requests", "first_token"])
def _score_index_blocks(
    scores_ptr,
    query_ptr,
    cache_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    num_requests,
    first_token,
    row_stride,
    head_stride,
    query_stride,
    block_stride,
    token_stride,
    table_stride,
    TOP_K: tl.constexpr,
    KEYS: tl.constexpr,
    LOCAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    token = row + first_token
    request, count = place_of(token, starts_ptr, contexts_ptr, num_requests)
    num_blocks = (count + KEYS - 1) // KEYS
    first = tl.program_id(1) * BLOCKS
    if num_blocks <= TOP_K or first >= num_blocks:
        return
    elements, heads = tl.arange(0, ELEMENTS), tl.arange(0, HEADS)
    inside = (heads < NUM_HEADS)[:, None] & (elements < DIM)[None, :]
    source = query_ptr + token.to(tl.int64) * query_stride + heads[:, None] * DIM
    query = tl.load(source + elements[None, :], mask=inside, other=0.0)
    table_ptr += request.to(tl.int64) * table_stride
    target = scores_ptr + row.to(tl.int64) * row_stride + heads * head_stride
    for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        for begin in range(0, KEYS, TILE):
            place = begin + tl.arange(0, TILE)
            keys = block * KEYS + place
            present = (place < KEYS) & (keys < count)
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0)
            places = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * token_stride
            wanted = present[:, None] & (elements < DIM)[None, :]
            rows = tl.load(cache_ptr + places[:, None] + elements[None, :], mask=wanted, other=0.0)
            products = tl.dot(query, tl.trans(rows), input_precision="ieee")
            products = tl.where(present[None, :], products, float("-inf"))
            best = tl.maximum(best, tl.max(products, axis=1))
        best = tl.where(block >= num_blocks - LOCAL, float("inf"), best)
        tl.store(target + block, best, mask=heads < NUM_HEADS)


@triton.jit(do_not_specialize=["num_requests", "first_token"])
def _choose_blocks(
    chosen_ptr,
    new_starts_ptr,
    lens_ptr,
    scores_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    num_requests,
    first_token,
    row_stride,
    head_stride,
    table_stride,
    TOP_K: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    token = row + first_token
    request, count = place_of(token, starts_ptr, contexts_ptr, num_requests)
    num_blocks = (count + KEYS - 1) // KEYS
    per_block: tl.constexpr = KEYS // BLOCK_SIZE
    table_ptr += request.to(tl.int64) * table_stride
    chosen_ptr += (token.to(tl.int64) * NUM_HEADS + head) * (TOP_K * per_block)
    scores_ptr += row.to(tl.int64) * row_stride + head * head_stride
    if head == 0:
        num_skipped = tl.maximum(num_blocks - TOP_K, 0)
        tl.store(lens_ptr + token, tl.maximum(count, 0) - num_skipped * KEYS)
        num_tokens = tl.load(starts_ptr + num_requests)
        tl.store(new_starts_ptr + token + 1, tl.minimum(token + 1, num_tokens))
        if token == 0:
            tl.store(new_starts_ptr, token)
    last, left = least_chosen(scores_ptr, num_blocks, TOP_K, SIZE)
    none = count * 0
    found, tied = none, none
    entries = tl.arange(0, ENTRIES)
    for begin in range(0, num_blocks, SIZE):
        blocks = begin + tl.arange(0, SIZE)
        is_chosen, places, found, tied = chosen_places(
            scores_ptr, blocks, num_blocks, last, left, found, tied, TOP_K
        )
        sources = blocks[:, None] * per_block + entries[None, :]
        wanted = is_chosen[:, None] & (entries < per_block)[None, :]
        wanted &= sources * BLOCK_SIZE < count
        copied = tl.load(table_ptr + sources, mask=wanted, other=0)
        tl.store(chosen_ptr + places[:, None] * per_block + entries[None, :], copied, mask=wanted)


def choose_blocks(
    chosen: Tensor,
    starts: Tensor,
    lens: Tensor,
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scores: Tensor,
    size: int,
    num_local: int,
) -> None:
    """Computes the same as ``reference.indexer.choose_blocks``.

    Args:
        chosen: [tokens, num_heads, top_k * size / block_size] int32, contiguous; the first entries
            of a row are written.
        starts: [tokens + 1] int32; gets 0, 1 and so on, up to the number of tokens of requests:
            each becomes a request of its own.
        lens: [tokens] int32; gets the numbers of keys of the chosen blocks, 0 for tokens of no
            request.
        query: [tokens, num_heads, dim], heads contiguous, normalised and rotated.
        cache: [blocks, block_size, dim], rows contiguous, any other strides; the dtype of
            ``query``.
        block_table, query_starts, context_lens: see `attention.paged_attention`.
        scores: [rows, num_heads, blocks] float32, scratch memory, for the longest context.
        size: the number of keys of a block, a multiple of ``block_size``.
        num_local: how many of the last blocks are always chosen, from 1 to top_k.

    Two launches a layer for each ``rows`` tokens. The first reads the keys of each token's context,
    256 bytes for 128 elements, and has 2 * num_heads * dim flops for each: a decode at 32,768
    tokens with 4 heads reads 8.4 MB, 2 us. The second reads 4 bytes for each score, 34 times, from
    the L2 cache: 1 KiB for each head there.
    """
    tokens, num_heads, dim = query.shape
    block_size, requests = cache.shape[1], len(context_lens)
    per_block, most = size // block_size, scores.shape[2]
    top_k = chosen.shape[2] // per_block
    assert size % block_size == 0, "blocks of keys are whole blocks of the cache"
    assert chosen.shape == (tokens, num_heads, top_k * per_block), "chosen: whole blocks"
    assert chosen.is_contiguous(), "chosen must be contiguous"
    assert scores.shape[1] >= num_heads, "scores: a row for each head"
    assert 1 <= num_local <= top_k, "the last block is always chosen"
    assert query.stride(1) == dim, "heads must be contiguous"
    assert cache.stride(2) == query.stride(2) == 1, "the last dimension must be contiguous"
    assert cache.dtype is query.dtype, "all floating tensors have one dtype"
    assert scores.dtype is torch.float32, "scores are float32"
    if tokens == 0:
        return
    assert requests, "tokens have requests, or are padding beside them"
    requests_of = block_table, query_starts, context_lens, requests
    per_program = max(KEYS_PER_PROGRAM // size, 1)
    entries = next_power_of_two(per_block)
    for first in range(0, tokens, len(scores)):
        count = min(len(scores), tokens - first)
        strides = scores.stride(0), scores.stride(1)
        if most > top_k:
            _score_index_blocks[(count, triton.cdiv(most, per_program))](
                scores,
                query,
                cache,
                *requests_of,
                first,
                *strides,
                query.stride(0),
                *cache.stride()[:2],
                block_table.stride(0),
                TOP_K=top_k,
                KEYS=size,
                LOCAL=num_local,
                NUM_HEADS=num_heads,
                DIM=dim,
                BLOCK_SIZE=block_size,
                HEADS=max(next_power_of_two(num_heads), 16),
                ELEMENTS=max(next_power_of_two(dim), 16),
                TILE=max(min(next_power_of_two(size), MOST_KEYS), 16),
                BLOCKS=per_program,
                num_warps=4,
            )
        _choose_blocks[(count, num_heads)](
            chosen,
            starts,
            lens,
            scores,
            *requests_of,
            first,
            *strides,
            block_table.stride(0),
            TOP_K=top_k,
            KEYS=size,
            NUM_HEADS=num_heads,
            BLOCK_SIZE=block_size,
            ENTRIES=entries,
            SIZE=max(min(SEARCHED, ENTRIES_AT_ONCE // entries), 1),
            num_warps=4,
        )
