"""An indexer's kernels: they store the index keys of a step's tokens, and choose which tokens each
token attends to.

A choice is a row of slots, in the order of positions, which `latent_attention` reads in place of a
row of the block table. Tokens with a short context have all of it, and no scores. The scores of a
few tokens at a time lie in scratch memory between the launch that computes them and the one that
searches the last chosen one, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.choices import chosen_places, entry_place, least_chosen, place_of
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.rope_write import stored

TILE = 64
"""The number of keys that a program scores at a time."""
TILES_PER_PROGRAM = 8
SEARCHED = 1024
"""The number of scores that a search reads at a time."""
TOKENS_AT_ONCE = 128
"""The largest number of tokens whose scores lie in scratch memory."""


class RequestTables(NamedTuple):
    """See `attention.paged_attention`."""

    block_table: Tensor
    query_starts: Tensor
    context_lens: Tensor


@triton.jit
def _partners(elements, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Returns for each element the one that it rotates with, and the place of their angle. Those
    below 0 and from 2 * HALF on do not rotate."""
    if IS_INTERLEAVED:
        partners, angles = elements ^ 1, elements // 2
        is_first = elements % 2 == 0
    else:
        is_first = elements < HALF
        partners = tl.where(is_first, elements + HALF, elements - HALF)
        angles = tl.where(is_first, elements, elements - HALF)
    is_rotated = (elements >= 0) & (elements < 2 * HALF)
    return tl.where(is_rotated, partners, elements), angles, is_first, is_rotated


@triton.jit
def _rotated(
    x, partner, cos_ptr, sin_ptr, elements, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr
):
    """Returns rotated elements, float32, of one row or of several.

    Args:
        x: the elements.
        partner: those that they rotate with.
        cos_ptr: pointer to the token's cosines, 2 * HALF of them, of which the second half is read.
        sin_ptr: to its sines, likewise.
        elements: the places of the elements, from the first one of a row on that rotates.
    """
    _, angles, is_first, is_rotated = _partners(elements, HALF, IS_INTERLEAVED)
    cos = tl.load(cos_ptr + HALF + angles, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + HALF + angles, mask=is_rotated, other=0.0).to(tl.float32)
    return x * cos + partner * tl.where(is_first, -sin, sin)


@triton.jit
def _store_index_keys(
    cache_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    x_stride,
    cos_stride,
    sin_stride,
    block_stride,
    token_stride,
    block_size,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    elements, source = tl.arange(0, ELEMENTS), x_ptr + token * x_stride
    inside = elements < DIM
    x = tl.load(source + elements, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / DIM
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / DIM + eps)

    weight = tl.load(weight_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    normed = (centred * scale * weight + bias).to(dtype).to(tl.float32)
    partners, _, _, _ = _partners(elements, HALF, IS_INTERLEAVED)
    x = tl.load(source + partners, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + partners, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + partners, mask=inside, other=0.0).to(tl.float32)
    partner = ((x - mean) * scale * weight + bias).to(dtype).to(tl.float32)

    key = _rotated(
        normed, partner, cos_ptr + token * cos_stride, sin_ptr + token * sin_stride, elements, HALF,
        IS_INTERLEAVED,
    )  # fmt: skip
    target = cache_ptr + slot // block_size * block_stride + slot % block_size * token_stride
    tl.store(target + elements, stored(key, dtype, cache_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_requests", "first_token"])
def _score_index_keys(
    scores_ptr,
    query_ptr,
    weights_ptr,
    cache_ptr,
    cos_ptr,
    sin_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    num_requests,
    first_token,
    scores_stride,
    query_stride,
    weights_stride,
    cos_stride,
    sin_stride,
    block_stride,
    token_stride,
    table_stride,
    TOP_K: tl.constexpr,
    RATE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0)
    token = row + first_token
    request, count = place_of(token, starts_ptr, contexts_ptr, num_requests)
    count //= RATE
    first = tl.program_id(1) * TILES * TILE
    if count <= TOP_K or first >= count:
        return
    token = token.to(tl.int64)
    elements, heads = tl.arange(0, ELEMENTS), tl.arange(0, HEADS)
    inside = (heads < NUM_HEADS)[:, None] & (elements < DIM)[None, :]
    own = elements - FIRST
    partners, _, _, _ = _partners(own, HALF, IS_INTERLEAVED)
    source = query_ptr + token * query_stride + heads[:, None] * DIM
    query = tl.load(source + elements[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + FIRST + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    angles = cos_ptr + token * cos_stride, sin_ptr + token * sin_stride
    query = _rotated(query, partner, *angles, own[None, :], HALF, IS_INTERLEAVED)
    query = query.to(query_ptr.dtype.element_ty)
    weights = tl.load(
        weights_ptr + token * weights_stride + heads, mask=heads < NUM_HEADS, other=0.0
    ).to(tl.float32)
    table_ptr += request.to(tl.int64) * table_stride
    last = tl.minimum(first + TILES * TILE, count)
    for begin in range(first, last, TILE):
        keys = begin + tl.arange(0, TILE)
        present = keys < count
        index, at = entry_place(keys, RATE, BLOCK_SIZE)
        blocks = tl.load(table_ptr + index, mask=present, other=0)
        places = blocks.to(tl.int64) * block_stride + at * token_stride
        wanted = present[:, None] & (elements < DIM)[None, :]
        rows = tl.load(cache_ptr + places[:, None] + elements[None, :], mask=wanted, other=0.0)
        products = tl.maximum(tl.dot(query, tl.trans(rows), input_precision="ieee"), 0.0)
        total = tl.sum(products * weights[:, None], axis=0)
        tl.store(scores_ptr + row.to(tl.int64) * scores_stride + keys, total, mask=present)


@triton.jit(do_not_specialize=["num_requests", "first_token"])
def _choose_tokens(
    chosen_ptr,
    new_starts_ptr,
    lens_ptr,
    scores_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    num_requests,
    first_token,
    scores_stride,
    table_stride,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    token = row + first_token
    request, count = place_of(token, starts_ptr, contexts_ptr, num_requests)
    table_ptr += request.to(tl.int64) * table_stride
    chosen_ptr += token.to(tl.int64) * TOP_K
    scores_ptr += row.to(tl.int64) * scores_stride
    tl.store(lens_ptr + token, tl.minimum(count, TOP_K))
    num_tokens = tl.load(starts_ptr + num_requests)
    tl.store(new_starts_ptr + token + 1, tl.minimum(token + 1, num_tokens))
    if token == 0:
        tl.store(new_starts_ptr, token)
    last, left = least_chosen(scores_ptr, count, TOP_K, SIZE)
    none = count * 0
    found, tied = none, none
    for begin in range(0, count, SIZE):
        keys = begin + tl.arange(0, SIZE)
        is_chosen, places, found, tied = chosen_places(
            scores_ptr, keys, count, last, left, found, tied, TOP_K
        )
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_chosen, other=0)
        tl.store(chosen_ptr + places, blocks * BLOCK_SIZE + keys % BLOCK_SIZE, mask=is_chosen)


def store_index_keys(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Computes the same as ``reference.indexer.store_index_keys``, with float32 intermediates.

    Args:
        cache: [blocks, block_size, dim], rows contiguous, any other strides.
        x: [tokens, dim], rows contiguous, in the dtype of all floating tensors.
        weight, bias: [dim], those of the keys' LayerNorm.
        eps: its eps.
        cos: [tokens, rope_dim], rows contiguous; only the second half is read.
        sin: as ``cos``.
        slots: [tokens] int64; a token whose slot is -1 is not written.
        interleaved: whether neighbouring elements are rotated together.

    One launch a layer, with a program for each token: 2 us for one token, the time of a launch.
    """
    tokens, dim = x.shape
    assert cache.shape[2] == dim, "the cache has keys of another size"
    assert cos.shape[1] <= dim, "more elements rotate than there are"
    for tensor in (cache, x, weight, bias, cos, sin):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype is x.dtype, "all floating tensors have one dtype"
    if tokens == 0:
        return
    _store_index_keys[(tokens,)](
        cache,
        x,
        weight,
        bias,
        cos,
        sin,
        slots,
        x.stride(0),
        cos.stride(0),
        sin.stride(0),
        *cache.stride()[:2],
        cache.shape[1],
        eps,
        DIM=dim,
        HALF=cos.shape[1] // 2,
        IS_INTERLEAVED=interleaved,
        ELEMENTS=next_power_of_two(dim),
        num_warps=1,
    )


def choose_tokens(
    chosen: Tensor,
    starts: Tensor,
    lens: Tensor,
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scores: Tensor,
    interleaved: bool,
) -> None:
    """Computes the same as ``reference.indexer.choose_tokens``.

    Args:
        chosen: [tokens, top_k] int32, contiguous; gets the slots of the chosen tokens.
        starts: [tokens + 1] int32; gets 0, 1 and so on, up to the number of tokens of requests:
            each becomes a request of its own.
        lens: [tokens] int32; gets the numbers of chosen tokens, 0 for tokens of no request.
        query: [tokens, num_heads, dim], heads contiguous, not rotated.
        weights: [tokens, num_heads], heads contiguous.
        cache: see `store_index_keys`.
        cos, sin: likewise.
        block_table, query_starts, context_lens: see `attention.paged_attention`.
        scores: [rows, positions] float32, scratch memory, for the longest context.
        interleaved: likewise.

    Two launches a layer for each TOKENS_AT_ONCE tokens. The first reads the keys of each token's
    context, 256 bytes for 128 elements, and has 2 * num_heads * dim flops for each: a decode at
    32,768 tokens with 64 heads reads 8.4 MB, 2 us, and has 0.54 Gflop. The second reads 4 bytes for
    each score, 34 times, from the L2 cache.
    """
    tokens, _, dim = query.shape
    top_k, requests = chosen.shape[1], len(context_lens)
    assert chosen.is_contiguous(), "chosen must be contiguous"
    assert query.stride(1) == dim, "heads must be contiguous"
    assert scores.dtype is torch.float32, "scores are float32"
    if tokens == 0:
        return
    assert requests, "tokens have requests, or are padding beside them"
    of_requests = RequestTables(block_table, query_starts, context_lens)
    for first in range(0, tokens, len(scores)):
        count = min(len(scores), tokens - first)
        score_keys(
            scores, query, weights, cache, cos, sin, of_requests, first, count, top_k, interleaved
        )
        _choose_tokens[(count,)](
            chosen,
            starts,
            lens,
            scores,
            *of_requests,
            requests,
            first,
            scores.stride(0),
            block_table.stride(0),
            TOP_K=top_k,
            BLOCK_SIZE=cache.shape[1],
            SIZE=SEARCHED,
            num_warps=8,
        )


def score_keys(
    scores: Tensor,
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    of_requests: RequestTables,
    first: int,
    count: int,
    top_k: int,
    interleaved: bool,
    block_size: int | None = None,
    rate: int = 1,
    first_rotated: int = 0,
) -> None:
    """Computes the scores of the keys of some tokens that have more of them than are chosen.

    Args:
        scores, query, weights, cache, cos, sin, interleaved: see `choose_tokens`.
        of_requests: the tables of requests.
        first, count: the first of the tokens, and their number.
        top_k: how many are chosen at most.
        block_size: the number of tokens of a block; None: a block has as many rows.
        rate: for how many tokens a key stands.
        first_rotated: the first element of a query that rotates.
    """
    num_heads, dim = query.shape[1:]
    most, per_program = scores.shape[1], TILE * TILES_PER_PROGRAM
    if most <= top_k:
        return
    _score_index_keys[(count, triton.cdiv(most, per_program))](
        scores, query, weights, cache, cos, sin, *of_requests, len(of_requests.context_lens), first,
        scores.stride(0), query.stride(0), weights.stride(0), cos.stride(0), sin.stride(0),
        *cache.stride()[:2], of_requests.block_table.stride(0), TOP_K=top_k, RATE=rate,
        NUM_HEADS=num_heads, DIM=dim, FIRST=first_rotated, HALF=cos.shape[1] // 2,
        IS_INTERLEAVED=interleaved, BLOCK_SIZE=block_size or cache.shape[1],
        HEADS=max(next_power_of_two(num_heads), 16), ELEMENTS=max(next_power_of_two(dim), 16),
        TILE=TILE, TILES=TILES_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
