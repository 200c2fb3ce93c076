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
def query_heads_with_norms(rows, kv_head, HAS_OWN: tl.constexpr, HEADS_PER_KV: tl.constexpr):
    """Returns the numbers of the rows' query heads, which have weights of their own, [rows], or [1]
    if there is one; None: all heads have the same."""
    heads = None
    if HAS_OWN:
        heads = kv_head + tl.arange(0, 1)
        if HEADS_PER_KV > 1:
            heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    return heads


@triton.jit
def key_head_with_norm(kv_head, HAS_OWN: tl.constexpr):
    """Returns the number of the kv head, whose key has weights of its own, [1]; None: all heads
    have the same."""
    heads = None
    if HAS_OWN:
        heads = kv_head + tl.arange(0, 1)
    return heads


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
def scale_of_all_heads(
    first_ptr, token_stride, query_len, tokens, eps, WIDTH: tl.constexpr, NORM_TOKENS: tl.constexpr
):  # fmt: skip
    """Returns what a norm of WIDTH elements, those of all heads side by side, multiplies the heads
    of some tokens by, [tokens, 1]; None: each head has a scale of its own."""
    scale = None  # Triton 3.6 returns no tuple that contains None
    if NORM_TOKENS:
        squares = _squares_of(first_ptr, token_stride, query_len, WIDTH, NORM_TOKENS)
        scale = _of_tokens(tl.rsqrt(squares / WIDTH + eps), tokens, NORM_TOKENS)
    return scale
