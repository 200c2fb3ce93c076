"""Kernel functions of the query rows of decodes: where they lie, their angles, and their norms.

A row is a query head of one of a request's new tokens: first those of the first token that share a
kv head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.rotated_heads import load_angles

ELEMENTS_AT_ONCE = tl.constexpr(2048)
"""How many elements of all heads side by side an iteration loads; four are in flight."""


@triton.jit
def places_of(
    rows, token_stride, HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, MAX_TOKENS: tl.constexpr
):
    """Returns where rows begin in a tensor of heads, behind the first row."""
    places = rows * DIM
    if MAX_TOKENS > 1:
        places = rows // HEADS_PER_KV * token_stride + rows % HEADS_PER_KV * DIM
    return places


@triton.jit
def angles_of_rows(
    cos, sin, cos_ptr, sin_ptr, cos_stride, sin_stride, rows, is_row, pair, is_second,
    ROTARY_HALF: tl.constexpr, HEADS_PER_KV: tl.constexpr, DIM_PADDED: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
):  # fmt: skip
    """Returns the angles of the rows' tokens, which are those of the new keys if there is one."""
    if MAX_TOKENS > 1:
        cos, sin = load_angles(
            cos_ptr, sin_ptr, cos_stride, sin_stride, rows // HEADS_PER_KV, is_row, pair, is_second,
            ROTARY_HALF, DIM_PADDED,
        )  # fmt: skip
    return cos, sin


@triton.jit
def heads_with_norms(rows, kv_head, NORM_TOKENS: tl.constexpr, HEADS_PER_KV: tl.constexpr):
    """Returns the numbers of the rows' query heads and of the kv head, which have weights of their
    own, [rows] or [1] each; None: all heads have the same."""
    query_heads, key_heads = None, None
    if NORM_TOKENS:
        key_heads = kv_head + tl.arange(0, 1)
        query_heads = key_heads
        if HEADS_PER_KV > 1:
            query_heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    return query_heads, key_heads


@triton.jit
def _squares_of(
    first_ptr, token_stride, query_len, WIDTH: tl.constexpr, NORM_TOKENS: tl.constexpr
):  # fmt: skip
    """Returns the sum of squares of WIDTH elements of each new token, [NORM_TOKENS]."""
    chunk: tl.constexpr = ELEMENTS_AT_ONCE // NORM_TOKENS
    tokens, columns = tl.arange(0, NORM_TOKENS), tl.arange(0, chunk)
    places = first_ptr + (tokens * token_stride)[:, None] + columns[None, :]
    is_token = (tokens < query_len)[:, None]
    squares = tl.zeros((NORM_TOKENS, chunk), tl.float32)
    for begin in tl.range(0, WIDTH, chunk, loop_unroll_factor=4):
        inside = is_token & (begin + columns < WIDTH)[None, :]
        x = tl.load(places + begin, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    return tl.sum(squares, axis=1)


@triton.jit
def _of_tokens(scales, tokens, NORM_TOKENS: tl.constexpr):
    """Returns the scale of each of some tokens, [tokens, 1]."""
    wanted = tokens[:, None] == tl.arange(0, NORM_TOKENS)[None, :]
    return tl.sum(tl.where(wanted, scales[None, :], 0.0), axis=1)[:, None]


@triton.jit
def scales_of_all_heads(
    heads_ptr, token_stride, query_len, rows, new, eps,
    NORM_TOKENS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Returns what norms of all query heads side by side, and of all key heads, multiply the rows
    and the new keys by, [rows, 1] and [new, 1]; None: each head has a scale of its own."""
    of_rows, of_keys = None, None
    if NORM_TOKENS:
        width: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV * DIM
        kv_width: tl.constexpr = NUM_KV_HEADS * DIM
        squares = _squares_of(heads_ptr, token_stride, query_len, width, NORM_TOKENS)
        key_squares = _squares_of(heads_ptr + width, token_stride, query_len, kv_width, NORM_TOKENS)
        scales = tl.rsqrt(squares / width + eps)
        key_scales = tl.rsqrt(key_squares / kv_width + eps)
        of_rows = _of_tokens(scales, rows // HEADS_PER_KV, NORM_TOKENS)
        of_keys = _of_tokens(key_scales, new, NORM_TOKENS)
    return of_rows, of_keys
