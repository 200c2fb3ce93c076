"""The products with a matrix for each head before and behind a latent attention, of a few tokens.

Each is launched with its neighbours. The one before projects queries to the width of a latent; the
same launch rotates the queries' other parts, and writes the tokens' latents to the cache. The one
behind joins the parts of split contexts, and projects the result to values.

A program of the launch before multiplies some tokens with some rows of a head's matrix
(`kept_rows`); one behind multiplies a token with rows of tile after tile, as many as make up for
joining its parts. A dependent launch (from compute capability 9.0 on) loads its first weights
before it waits for the launch before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.float8 import as_stored
from shmllm_kernels.gpu.kept_rows import (
    WEIGHTS_PER_WARP,
    load_rows,
    multiply,
    tokens_per_program,
)
from shmllm_kernels.gpu.latent_write import check_latents, pairs_of, rotated_pairs, write_latent

NUM_WARPS = 4
WEIGHTS = NUM_WARPS * WEIGHTS_PER_WARP
PER_PROCESSOR = 4
"""How many programs run at once on a multiprocessor, at least."""
PARTS = 4
"""The parts of a context that it joins at a time."""


@triton.jit(do_not_specialize=["num_tokens", "tokens_at_once"])
def _absorb_queries(
    latents_ptr,
    query_ptr,
    weight_ptr,
    cache_ptr,
    x_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    num_tokens,
    tokens_at_once,
    latents_token_stride,
    latents_head_stride,
    query_token_stride,
    x_stride,
    cos_stride,
    sin_stride,
    block_stride,
    token_stride,
    block_size,
    eps,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first_token = tl.program_id(1) * tokens_at_once
    last_token = tl.minimum(first_token + tokens_at_once, num_tokens)
    if IS_DEPENDENT:
        gdc_launch_dependents()
    if program == NUM_HEADS * BLOCKS:
        if IS_DEPENDENT:
            gdc_wait()
        for token in range(first_token, last_token):
            write_latent(
                cache_ptr, x_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr, token,
                x_stride, cos_stride, sin_stride, block_stride, token_stride, block_size, eps,
                RANK, HALF, IS_INTERLEAVED, ELEMENTS, PAIRS,
            )  # fmt: skip
    else:
        head, block = program // BLOCKS, program % BLOCKS
        rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        of_head = weight_ptr + head.to(tl.int64) * RANK * NOPE
        weight = load_rows(of_head, rows, RANK, NOPE, NOPE_PADDED)
        if IS_DEPENDENT:
            gdc_wait()
        query_ptr += head * (NOPE + 2 * HALF)
        latents_ptr += head * latents_head_stride
        dtype: tl.constexpr = query_ptr.dtype.element_ty
        ks = tl.arange(0, NOPE_PADDED)
        for token in range(first_token, last_token):
            query = tl.load(query_ptr + token * query_token_stride + ks, mask=ks < NOPE, other=0.0)
            places = latents_ptr + token * latents_token_stride + rows
            tl.store(places, multiply(weight, query).to(dtype), mask=rows < RANK)
        if block == 0:
            first_place, second_place = pairs_of(HALF, IS_INTERLEAVED, PAIRS)
            inside = tl.arange(0, PAIRS) < HALF
            for token in range(first_token, last_token):
                part = query_ptr + token * query_token_stride + NOPE
                first, second = rotated_pairs(
                    part, cos_ptr + token * cos_stride, sin_ptr + token * sin_stride,
                    first_place, second_place, HALF, PAIRS,
                )  # fmt: skip
                tl.store(part + first_place, first.to(dtype), mask=inside)
                tl.store(part + second_place, second.to(dtype), mask=inside)


@triton.jit
def _joined(
    sums_ptr, stats_ptr, first_part,
    NUM_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns a head's joined output of one token, [RANK_PADDED] float32."""
    ranks = tl.arange(0, RANK_PADDED)
    stats = stats_ptr + 2 * (first_part + tl.arange(0, NUM_SPLITS))
    peaks = tl.load(stats)
    highest = tl.max(peaks, axis=0)
    total = tl.sum(tl.load(stats + 1) * tl.exp2(peaks - highest), axis=0)
    joined = tl.zeros((RANK_PADDED,), tl.float32)
    for begin in tl.static_range(0, NUM_SPLITS, AT_ONCE):
        parts = first_part + begin + tl.arange(0, AT_ONCE)
        shares = tl.exp2(tl.load(stats_ptr + 2 * parts) - highest)
        # The program of a split without keys wrote no sums.
        is_written = tl.load(stats_ptr + 2 * parts + 1) > 0.0
        places = sums_ptr + parts[:, None] * RANK + ranks[None, :]
        sums = tl.load(places, mask=(ranks < RANK)[None, :], other=0.0)
        joined += tl.sum(tl.where(is_written[:, None], sums * shares[:, None], 0.0), axis=0)
    return joined / total


@triton.jit(do_not_specialize=["num_requests", "tiles"])
def _project_values(
    out_ptr,
    latents_ptr,
    weight_ptr,
    sums_ptr,
    stats_ptr,
    starts_ptr,
    num_requests,
    tiles,
    out_stride,
    latents_token_stride,
    latents_head_stride,
    NUM_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK_PADDED: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(2)
    rows = tl.program_id(1) * BLOCK_N * tiles + tl.arange(0, BLOCK_N)
    if IS_DEPENDENT:
        gdc_launch_dependents()
    weight_ptr += head.to(tl.int64) * VALUE * RANK
    weight = load_rows(weight_ptr, rows, VALUE, RANK, RANK_PADDED)
    if IS_DEPENDENT:
        gdc_wait()
    if token >= tl.load(starts_ptr + num_requests):
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    ranks = tl.arange(0, RANK_PADDED)
    if NUM_SPLITS == 1:
        places = latents_ptr + token * latents_token_stride + head * latents_head_stride
        latent = tl.load(places + ranks, mask=ranks < RANK, other=0.0)
    else:
        part = (token * tl.num_programs(0) + head).to(tl.int64) * NUM_SPLITS
        joined = _joined(sums_ptr, stats_ptr, part, NUM_SPLITS, AT_ONCE, RANK, RANK_PADDED)
        latent = joined.to(dtype)
    out_ptr += token * out_stride + head * VALUE
    for _ in range(1, tiles):
        following = load_rows(weight_ptr, rows + BLOCK_N, VALUE, RANK, RANK_PADDED)
        tl.store(out_ptr + rows, multiply(weight, latent).to(dtype), mask=rows < VALUE)
        rows += BLOCK_N
        weight = following
    tl.store(out_ptr + rows, multiply(weight, latent).to(dtype), mask=rows < VALUE)


def absorb_queries(
    latents: Tensor,
    query: Tensor,
    key_up: Tensor,
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    interleaved: bool = False,
    is_dependent: bool = False,
) -> None:
    """Projects queries to the width of a latent, rotates their other parts in place, and writes the
    tokens' latents to the cache.

    Computes ``latents[:, head] = query[:, head, :nope_dim] @ key_up[head].T``, of the rest of each
    head ``reference.rope.rotate``, and ``reference.latent_write.write_latents``.

    Args:
        latents: [tokens, heads, rank], the last dimension contiguous; float32, float16 or bfloat16,
            like all other tensors but ``slots``.
        query: [tokens, heads, nope_dim + rope_dim], each token contiguous.
        key_up: [heads, rank, nope_dim], contiguous.
        cache, x, weight, eps, cos, sin, slots, interleaved: see `latent_write.write_latents`.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0, and ``key_up`` must be complete by then.

    One launch a layer. For DeepSeek-V2-Lite (16 heads, 512 x 128) ``key_up`` is 2.1 MB in 128
    programs: 0.5 us at 4.26 TB/s, and about 1.5 us for the launch; two tokens for each of 512
    programs read it from the cache four times, 8.4 MB, 1.7 us. In steps of more tokens the same
    takes three launches.
    """
    tokens, heads, rank = latents.shape
    nope = key_up.shape[2]
    rope_dim = query.shape[2] - nope
    assert key_up.shape == (heads, rank, nope), "key_up: a matrix for each head"
    assert key_up.is_contiguous(), "key_up must be contiguous"
    assert query.shape[:2] == (tokens, heads), "query: one for each token and head"
    assert query.stride()[1:] == (query.shape[2], 1), "the heads of a token must be contiguous"
    assert latents.stride(2) == 1, "latents must be contiguous"
    assert latents.dtype is query.dtype is key_up.dtype, "all floating tensors have one dtype"
    assert x.shape == (tokens, rank + rope_dim), "x: a latent and a key part for each token"
    assert len(weight) == rank, "the norm of a latent"
    check_latents(cache, x, weight, cos, sin, slots)
    if tokens == 0:
        return
    padded = next_power_of_two(nope)
    block_n = min(max(WEIGHTS // padded, 1), next_power_of_two(rank))
    programs = heads * triton.cdiv(rank, block_n) + 1
    at_once = tokens_per_program(tokens, programs, PER_PROCESSOR, query.device)
    _absorb_queries[programs, triton.cdiv(tokens, at_once)](
        latents,
        query,
        key_up,
        as_stored(cache, x.dtype),
        x,
        weight,
        cos,
        sin,
        slots,
        tokens,
        at_once,
        *latents.stride()[:2],
        query.stride(0),
        x.stride(0),
        cos.stride(0),
        sin.stride(0),
        *cache.stride()[:2],
        cache.shape[1],
        eps,
        NUM_HEADS=heads,
        RANK=rank,
        NOPE=nope,
        HALF=rope_dim // 2,
        IS_INTERLEAVED=interleaved,
        IS_DEPENDENT=is_dependent,
        BLOCK_N=block_n,
        NOPE_PADDED=padded,
        ELEMENTS=next_power_of_two(rank),
        PAIRS=next_power_of_two(rope_dim // 2),
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if is_dependent else {}),
    )


def project_values(
    out: Tensor,
    latents: Tensor,
    value_up: Tensor,
    query_starts: Tensor,
    num_splits: int = 1,
    scratch: AttentionScratch | None = None,
    is_dependent: bool = False,
) -> None:
    """Projects the output of `latent_attention.attend_parts` to values; rows of no request stay
    unchanged.

    Computes ``out[:, head] = latents[:, head] @ value_up[head].T``, where the latents of split
    contexts are the joined parts, rounded to the dtype.

    Args:
        out: [tokens, heads * value_dim], each row contiguous; float32, float16 or bfloat16.
        latents: [tokens, heads, rank], the last dimension contiguous, in out's dtype; not read if
            contexts are split.
        value_up: [heads, value_dim, rank], contiguous, in out's dtype.
        query_starts: see `attention.paged_attention`.
        num_splits, scratch: as of `latent_attention.attend_parts`.
        is_dependent: see `absorb_queries`; here it concerns ``value_up``.

    One launch a layer, with as many programs for eight tokens as for one. For DeepSeek-V2-Lite (16
    heads, 128 x 512) one token has 128 programs, which read 2.1 MB of ``value_up``, 0.5 us at 4.26
    TB/s, and each the 32 parts of its head from the cache, 64 KiB, 0.7 us. Of eight tokens a
    program reads all of its head's matrix instead, and its parts once: 192 KiB, 2 us. Joining them
    in a launch of its own, before a product of torch, takes two launches.
    """
    tokens, heads, rank = latents.shape
    value = value_up.shape[1]
    assert value_up.shape == (heads, value, rank), "value_up: a matrix for each head"
    assert value_up.is_contiguous(), "value_up must be contiguous"
    assert out.shape == (tokens, heads * value), "out: a row for each token"
    assert out.stride(1) == latents.stride(2) == 1, "rows must be contiguous"
    assert out.dtype is latents.dtype is value_up.dtype, "all floating tensors have one dtype"
    num_requests, sums, stats = len(query_starts) - 1, out, out
    if num_splits > 1:
        assert scratch is not None, "split contexts need scratch memory"
        sums, stats = scratch.sums, scratch.stats
    if tokens == 0 or num_requests == 0:
        return
    padded = next_power_of_two(rank)
    block_n = min(max(WEIGHTS // padded, 1), next_power_of_two(value))
    tiles = min(next_power_of_two(tokens), triton.cdiv(value, block_n))
    _project_values[heads, triton.cdiv(value, block_n * tiles), tokens](
        out,
        latents,
        value_up,
        sums,
        stats,
        query_starts,
        num_requests,
        tiles,
        out.stride(0),
        *latents.stride()[:2],
        NUM_SPLITS=num_splits,
        AT_ONCE=min(PARTS, num_splits),
        RANK=rank,
        VALUE=value,
        IS_DEPENDENT=is_dependent,
        BLOCK_N=block_n,
        RANK_PADDED=padded,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if is_dependent else {}),
    )
