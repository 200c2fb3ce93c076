"""Paged attention over latents: all query heads share one key head, whose values are its keys.

A program computes some tokens of one request and some of their heads. A tile of latents is loaded
once and multiplied twice: with the queries, and with the weights. The key part that carries the
position has a product of its own, so that no dimension is padded to the next power of two. Grid,
splits and requests are those of `attention`. All tiles are masked: the two products of a tile hide
it, and a second loop would spill registers. So the bits of a row do not depend on the tokens that
share its program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.attention import AttentionScratch, check_sinks
from shmllm_kernels.gpu.attention_kernels import LOG2_E, find_request, merge_splits
from shmllm_kernels.gpu.configs import AttentionConfig, next_power_of_two
from shmllm_kernels.gpu.float8 import as_stored, from_cache
from shmllm_kernels.gpu.rotated_heads import query_factor
from shmllm_kernels.reference.rope_write import QueryGrowth

MAX_RANK = 512


@triton.jit
def _attend_tiles(
    sums,
    peak,
    total,
    query,
    rope_query,
    positions,
    first_tile,
    last_tile,
    keys_end,
    cache_ptr,
    table_ptr,
    block_stride,
    token_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):
    """Updates the online softmax of all rows with the keys of some tiles."""
    ranks = tl.arange(0, RANK_PADDED)
    ropes = tl.arange(0, ROPE_PADDED)
    for tile in range(first_tile, last_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        # Slots without a token are not read: they may contain NaN, and 0 times NaN is NaN.
        present = keys < keys_end
        if HAS_SLOTS:
            entries = tl.load(table_ptr + keys, mask=present, other=0)
            blocks, offsets = entries // BLOCK_SIZE, entries % BLOCK_SIZE
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0)
            offsets = keys % BLOCK_SIZE
        slots = blocks.to(tl.int64) * block_stride + offsets * token_stride
        places = cache_ptr + slots[:, None]
        wanted = present[:, None] & (ranks < RANK)[None, :]
        latents = tl.load(places + ranks[None, :], mask=wanted, other=0)
        if ROPE:
            wanted = present[:, None] & (ropes < ROPE)[None, :]
            rotated = tl.load(places + RANK + ropes[None, :], mask=wanted, other=0)
        latents = from_cache(latents, query.dtype, query.shape[0])
        if ROPE:
            rotated = from_cache(rotated, query.dtype, query.shape[0])
            scores = tl.dot(rope_query, tl.trans(rotated), input_precision="ieee")
            scores = tl.dot(query, tl.trans(latents), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(query, tl.trans(latents), input_precision="ieee") * scale
        visible = present[None, :] & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # In a row whose keys were all masked so far, subtract 0 from minus infinity.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(
            weights.to(latents.dtype), latents, sums * shrink[:, None], input_precision="ieee"
        )
        peak = new_peak
    return sums, peak, total


@triton.jit(do_not_specialize=["num_requests"])
def attend_latents(
    out_ptr,
    query_ptr,
    rope_ptr,
    cache_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    part_sums_ptr,
    part_stats_ptr,
    sinks_ptr,
    num_requests,
    scale,
    growth,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    rope_token_stride,
    rope_head_stride,
    block_stride,
    token_stride,
    table_stride,
    IS_SPLIT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # The last tile of a prompt has the most keys. It is launched first, for all heads, so that the
    # launch ends with short programs.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = index // GROUPS
    request = find_request(starts_ptr, tile, num_requests, BLOCK_Q)
    begin = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - begin
    first_query = (tile - begin // BLOCK_Q - request) * BLOCK_Q
    if first_query >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    of_request = first_query + rows // HEADS
    heads = index % GROUPS * HEADS + rows % HEADS
    is_row = (of_request < query_len) & (rows < BLOCK_Q * HEADS) & (heads < NUM_HEADS)
    tokens = (begin + of_request).to(tl.int64)
    ranks = tl.arange(0, RANK_PADDED)
    ropes = tl.arange(0, ROPE_PADDED)
    is_element = is_row[:, None] & (ranks < RANK)[None, :]
    places = tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
    query = tl.load(query_ptr + places + ranks[None, :], mask=is_element, other=0.0)
    places = tokens[:, None] * rope_token_stride + heads[:, None] * rope_head_stride
    is_rope = is_row[:, None] & (ropes < ROPE)[None, :]
    rope_query = tl.load(rope_ptr + places + ropes[None, :], mask=is_rope, other=0.0)

    context = tl.load(contexts_ptr + request)
    positions = context - query_len + of_request
    if growth is not None:
        scale = (scale * query_factor(positions, growth))[:, None]
    first_position = context - query_len + first_query
    keys_end = tl.minimum(first_position + BLOCK_Q, context)
    lowest = tile * 0
    highest = tl.cdiv(keys_end, TILE)
    if IS_SPLIT:
        # A part has 2 * BLOCK_M keys or more: its sums are not more bytes than its latents.
        fewest: tl.constexpr = max(2 * BLOCK_M // TILE, 1)
        per_split = tl.maximum(tl.cdiv(highest, tl.num_programs(1)), fewest)
        lowest = tl.program_id(1) * per_split
        highest = tl.minimum(lowest + per_split, highest)

    sums = tl.zeros((BLOCK_M, RANK_PADDED), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        # A sink is one more key of the first part, whose value is zero.
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) * LOG2_E
        is_first = tl.program_id(1) == 0
        peak = tl.where(is_first, sinks, float("-inf"))
        total = tl.where(is_first, 1.0, total)
    table_ptr += request.to(tl.int64) * table_stride
    # fmt: off
    sums, peak, total = _attend_tiles(
        sums, peak, total, query, rope_query, positions, lowest, highest, keys_end, cache_ptr,
        table_ptr, block_stride, token_stride, scale,
        BLOCK_SIZE, HAS_SLOTS, TILE, RANK, ROPE, RANK_PADDED, ROPE_PADDED)
    # fmt: on

    if IS_SPLIT:
        part = (tokens * NUM_HEADS + heads) * tl.num_programs(1) + tl.program_id(1)
        tl.store(part_stats_ptr + 2 * part, peak, mask=is_row)
        tl.store(part_stats_ptr + 2 * part + 1, total, mask=is_row)
        part_places = part_sums_ptr + part[:, None] * RANK + ranks[None, :]
        tl.store(part_places, sums, mask=is_element & (total > 0.0)[:, None])
    else:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        places = tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride
        out_places = out_ptr + places + ranks[None, :]
        tl.store(out_places, result.to(out_ptr.dtype.element_ty), mask=is_element)


def heads_per_program(num_heads: int, config: AttentionConfig) -> int:
    """Returns the number of heads that a program computes of each of its tokens."""
    return min(num_heads, config.block_m)


def paged_latent_attention(
    out: Tensor,
    query: Tensor,
    rope_query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    config: AttentionConfig,
    scale: float,
    num_splits: int = 1,
    scratch: AttentionScratch | None = None,
    growth: QueryGrowth | None = None,
    has_slots: bool = False,
    sinks: Tensor | None = None,
) -> None:
    """Computes ``reference.latent_attention.paged_latent_attention``; rows of no request stay
    unchanged.

    Args:
        out: [tokens, num_heads, rank], the last dimension contiguous; may be ``query``.
        query: [tokens, num_heads, rank], strides as ``out``; rank is at most 512.
        rope_query: [tokens, num_heads, rope_dim], the last dimension contiguous; rope_dim may be 0.
        cache: [blocks, block_size, rank + rope_dim], the last dimension contiguous, any other
            strides; float8_e4m3fn, or query's dtype: float32, float16 or bfloat16.
        block_table, query_starts, context_lens: see `attention.paged_attention`.
        config: tile sizes and numbers of warps, from `configs.latent_config`.
        scale: the factor of the scores.
        num_splits, scratch: see `attention.paged_attention`; scratch is for heads of
            ``rank`` elements.
        growth: a factor of queries by their position; None: they have none.
        has_slots: whether ``block_table`` has the slot of each key, block * block_size + offset, in
            place of the blocks of keys that follow each other.
        sinks: [num_heads] float32, contiguous: scores without a value, which join the softmax's
            denominator; None: there are none.

    One launch a layer, two if contexts are split. It reads the latents of each request once for
    each block_q of its tokens and for each block_m of their heads, and has 4 * rank + 2 * rope_dim
    flops for each pair of a query row and a key. For DeepSeek-V2-Lite (16 heads, 512 and 64) a
    decode at a context of 1,024 reads 1.1 MiB: 0.3 us, the launch takes 4 us. 256 decodes read 302
    MB, 70 us, and have 9.1 Gflop, 12 us. In FP8 they read 151 MB, 35 us, and convert each number
    once, 1.1 million for each multiprocessor: at 32 a cycle 20 us, which the loads hide.
    """
    attend_parts(
        out, query, rope_query, cache, block_table, query_starts, context_lens, config, scale,
        num_splits, scratch, growth, has_slots, sinks=sinks,
    )  # fmt: skip
    tokens, num_heads, rank = query.shape
    requests = context_lens.shape[0]
    if num_splits == 1 or tokens == 0 or requests == 0:
        return
    assert scratch is not None, "split contexts need scratch memory"
    padded = max(next_power_of_two(rank), 16)
    merge_splits[(tokens, num_heads)](
        out,
        scratch.sums,
        scratch.stats,
        query_starts,
        requests,
        *out.stride()[:2],
        NUM_SPLITS=num_splits,
        DIM=rank,
        DIM_PADDED=padded,
        num_warps=min(max(num_splits * padded // 1024, 1), 4),
    )


def attend_parts(
    out: Tensor,
    query: Tensor,
    rope_query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    config: AttentionConfig,
    scale: float,
    num_splits: int = 1,
    scratch: AttentionScratch | None = None,
    growth: QueryGrowth | None = None,
    has_slots: bool = False,
    is_dependent: bool = False,
    sinks: Tensor | None = None,
) -> None:
    """Computes `paged_latent_attention`, but of split contexts the parts only: they are in
    ``scratch`` then, and ``out`` stays unchanged. Of a part without keys, scratch has a sum of
    weights of 0, and sums that may be anything.

    Args:
        out, query, rope_query, cache, block_table, query_starts, context_lens, config, scale,
            num_splits, scratch, growth, has_slots, sinks: see `paged_latent_attention`.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0.
    """
    tokens, num_heads, rank = query.shape
    requests, rope_dim = context_lens.shape[0], rope_query.shape[2]
    _check(out, query, rope_query, cache, block_table, query_starts, context_lens)
    check_sinks(sinks, num_heads)
    assert sinks is None or sinks.dtype is torch.float32, "sinks are float32"
    assert min(config.block_m, config.tile) >= 16, f"{config} is too small"
    assert num_splits == next_power_of_two(num_splits), "num_splits must be a power of two"
    if tokens == 0 or requests == 0:
        return
    sums, stats = (out, out)
    if num_splits > 1:
        assert scratch is not None, "split contexts need scratch memory"
        sums, stats = scratch.sums, scratch.stats
        assert sums.shape[0] >= tokens, "scratch is for fewer tokens"
        assert sums.shape[1:] == (num_heads, num_splits, rank), "scratch has another shape"
        assert sums.is_contiguous(), "scratch must be contiguous"
        assert stats.is_contiguous(), "scratch must be contiguous"
    heads = heads_per_program(num_heads, config)
    tiles = tokens // (config.block_m // heads) + requests
    padded = max(next_power_of_two(rank), 16)
    attend_latents[(tiles * triton.cdiv(num_heads, heads), num_splits)](
        out,
        query,
        rope_query,
        as_stored(cache, query.dtype),
        block_table,
        query_starts,
        context_lens,
        sums,
        stats,
        sinks,
        requests,
        scale * LOG2_E.value,
        growth,
        *out.stride()[:2],
        *query.stride()[:2],
        *rope_query.stride()[:2],
        *cache.stride()[:2],
        block_table.stride(0),
        IS_SPLIT=num_splits > 1,
        IS_DEPENDENT=is_dependent,
        NUM_HEADS=num_heads,
        HEADS=heads,
        BLOCK_SIZE=cache.shape[1],
        HAS_SLOTS=has_slots,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        RANK=rank,
        ROPE=rope_dim,
        RANK_PADDED=padded,
        ROPE_PADDED=max(next_power_of_two(rope_dim), 16),
        **({"launch_pdl": True} if is_dependent else {}),
        **config.launch_options,
    )


def _check(
    out: Tensor,
    query: Tensor,
    rope_query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> None:
    tokens, num_heads, rank = query.shape
    requests = context_lens.shape[0]
    assert rank <= MAX_RANK, f"latents of {rank} elements; at most {MAX_RANK}"
    assert out.shape == query.shape, "out must have query's shape"
    assert rope_query.shape[:2] == (tokens, num_heads), "rope_query: one for each query"
    assert cache.shape[2] == rank + rope_query.shape[2], "the cache has rows of another size"
    assert cache.stride(-1) == 1, "the last dimension must be contiguous"
    for tensor in (out, query, rope_query):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype is query.dtype, "queries and out have one dtype"
    assert block_table.shape[0] == requests, "block_table: one row per request"
    assert query_starts.shape == (requests + 1,), "query_starts: one more than requests"
    for tensor in (block_table, query_starts, context_lens):
        assert tensor.dtype is torch.int32, "tables and lengths are int32"
        assert tensor.stride(-1) == 1 or tensor.shape[-1] < 2, "tables and lengths are contiguous"
