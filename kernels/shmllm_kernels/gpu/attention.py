"""Launches paged attention: any mix of prefill chunks and decodes over block tables, in one launch.

The grid has ((tokens // block_q + requests) * kv heads, splits) programs. The host computes it
without reading a length from the device, and programs without work return. So a captured graph
serves every batch up to its size.

The bits of a row depend on its query, its keys, the config, the number of splits, and the chunks of
its prompt. With ``num_splits=1`` and ``masks_all`` they do not depend on the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm_kernels.gpu.attention_kernels import LOG2_E, attend, merge_splits
from shmllm_kernels.gpu.configs import AttentionConfig, next_power_of_two
from shmllm_kernels.gpu.float8 import as_stored
from shmllm_kernels.windows import Window, window_number

MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory for the partial results of split contexts. All layers share it.

    Attributes:
        sums: [tokens, num_heads, splits, value_dim] float32, sums of weighted values.
        stats: [tokens, num_heads, splits, 2] float32, the largest score and the sum of weights.
        counters: int32, one for each request and kv head, 0 between launches: how many parts of a
            decode's context have been summed up.
    """

    sums: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def allocate(
        cls, tokens: int, num_heads: int, splits: int, value_dim: int, device: torch.device
    ) -> AttentionScratch:
        """Allocates 4 * tokens * num_heads * (splits * (value_dim + 2) + 1) bytes."""
        shape = (tokens, num_heads, splits)
        sums = torch.empty((*shape, value_dim), dtype=torch.float32, device=device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=device)
        counters = torch.zeros(tokens * num_heads, dtype=torch.int32, device=device)
        return cls(sums, stats, counters)


def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    config: AttentionConfig,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 1,
    scratch: AttentionScratch | None = None,
    masks_all: bool = False,
    ends: Tensor | None = None,
    biases: Tensor | None = None,
) -> None:
    """Computes ``reference.attention.paged_attention``; rows of no request stay unchanged.

    The tensors may be padded: requests of length 0 after the last request, and tokens after the
    last request's tokens, are skipped.

    Args:
        out: [tokens, num_heads, value_dim], the last dimension contiguous.
        query: [tokens, num_heads, dim], likewise; dim and value_dim are at most 512.
        key_cache: [blocks, block_size, num_kv_heads, dim], the last dimension contiguous, any
            other strides; float8_e4m3fn, or query's dtype: float32, float16 or bfloat16.
        value_cache: [blocks, block_size, num_kv_heads, value_dim], the same strides and dtype.
        block_table: [requests, max_blocks] int32, rows contiguous. Entries after a request's last
            block are not read.
        query_starts: [requests + 1] int32, the index of each request's first token in ``query``;
            begins with 0 and does not decrease.
        context_lens: [requests] int32, the number of each request's tokens so far, those of
            ``query`` included.
        config: tile sizes and numbers of warps, from `configs.attention_config`.
        scale: the factor of the scores.
        window: the number of positions up to its own that a token attends to, or the chunk that
            they are in; None: all of them.
        soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)``; None: they stay.
        sinks: [num_heads], query's dtype: scores without a value, which join the softmax's
            denominator; None: there are none.
        num_splits: the number of parts that each context is split into; a power of two.
        scratch: memory for at least ``tokens`` tokens and exactly ``num_splits`` splits; None if
            ``num_splits`` is 1.
        masks_all: whether to apply a mask also to tiles that need none. Then the bits of a row do
            not depend on the tokens that share its program. Decodes set it for speed: they have one
            loop, which keeps its loads in flight up to the last tile.
        ends: [tokens] int32, contiguous, the end of the keys that each token attends to: behind its
            own position, and at most its request's context length; None: the attention is causal.
        biases: [num_heads, 2 * n - 1] float32, contiguous, with n above every position: what is
            added to scores, by the distance from a token to a key, from 1 - n on; or [tokens,
            num_heads, n], by the position of the key; None: nothing.

    One launch a layer, two if contexts are split. `attend` reads the keys and values of each
    request once for each block_q of its tokens, and has 2 * (dim + value_dim) flops for each
    pair of a query row and a key that it attends to. For Llama-3.1-8B (see the package's
    docstring):

    - A decode at a context of 1,024 reads 4 MiB, which takes 1 us. The launch takes 4 us, because
      the loads of lengths, of the table, of keys and values, and the store follow one another.
    - 256 decodes at a context of 1,024 read 1 GiB, which takes 250 us.
    - With FP8 keys and values these read 512 MiB, which take 125 us. The loop has 4.8 operations
      for each key or value, of which two convert it to bfloat16: 87 us if a multiprocessor issued
      four instructions in every cycle, and 130 us at two thirds of that. The launch takes 150 us.
    - A prompt of 8,192 tokens has 0.55 Tflop, which take 0.7 ms. Its programs read 4.3 GB, mostly
      from the L2 cache, which take 0.8 ms at 5.5 TB/s, at the same time. The launch takes 1.4 ms,
      because the softmax of a program does not overlap its products.

    `merge_splits` reads what `attend` wrote: 4 * tokens * num_heads * splits * (value_dim + 2)
    bytes. A decode in 32 parts has 0.5 MiB: 2 us. 256 tokens at the end of a long prompt, in 8
    parts, have 33 MiB: 16 us to write and read them.
    """
    tokens, num_heads, dim = query.shape
    requests, num_kv_heads = context_lens.shape[0], key_cache.shape[2]
    check_step(out, query, key_cache, value_cache, block_table, query_starts, context_lens, ends)
    per_kv, value_dim = num_heads // num_kv_heads, value_cache.shape[3]
    check_tiles(config, per_kv, num_splits)
    if tokens == 0 or requests == 0:
        return
    sums, stats = (out, out)
    if num_splits > 1:
        parts = checked(scratch, tokens, num_heads, num_splits, value_dim)
        sums, stats = parts.sums, parts.stats
    tiles = tokens // (config.block_m // per_kv) + requests
    check_sinks(sinks, num_heads)
    if biases is not None:
        assert biases.dtype is torch.float32, "biases are float32"
        assert biases.shape[-2] == num_heads, "biases: a row for each head"
        assert biases.dim() == 3 or biases.shape[1] % 2, "biases: as many behind a token as ahead"
        assert biases.dim() == 2 or len(biases) >= tokens, "biases: rows for each token"
        assert biases.is_contiguous(), "biases must be contiguous"
    value_padded = padded_dim(value_dim)
    attend[(tiles * num_kv_heads, num_splits)](
        out,
        query,
        as_stored(key_cache, query.dtype),
        as_stored(value_cache, query.dtype),
        block_table,
        query_starts,
        context_lens,
        sums,
        stats,
        out if sinks is None else sinks,
        ends,
        biases,
        requests,
        *scales_of(scale, soft_cap),
        window_number(window),
        *out.stride()[:2],
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_table.stride(0),
        0 if biases is None else biases.shape[-1],
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_ENDS=ends is not None,
        BIASES_OF_TOKENS=biases is not None and biases.dim() == 3,
        MASKS_ALL=masks_all,
        IS_SPLIT=num_splits > 1,
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PER_KV=per_kv,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_M=config.block_m,
        TILE=config.tile,
        DIM=dim,
        DIM_PADDED=padded_dim(dim),
        VALUE_DIM=value_dim,
        VALUE_PADDED=value_padded,
        **config.launch_options,
    )
    if num_splits > 1:
        merge_splits[(tokens, num_heads)](
            out,
            sums,
            stats,
            query_starts,
            requests,
            *out.stride()[:2],
            NUM_SPLITS=num_splits,
            DIM=value_dim,
            DIM_PADDED=value_padded,
            num_warps=min(max(num_splits * value_padded // 1024, 1), 4),
        )


def padded_dim(dim: int) -> int:
    """Returns how many elements kernels compute with for a head of these."""
    return max(next_power_of_two(dim), 16)


def scales_of(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Returns what kernels multiply scores by, so that they are exponents of 2: before the cap, if
    there is one, and behind it."""
    log2_e = LOG2_E.value
    return (scale * log2_e, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * log2_e)


def check_tiles(config: AttentionConfig, per_kv: int, num_splits: int) -> None:
    """Asserts that the sizes fit to the query heads that share a kv head."""
    assert min(config.block_m, config.tile) >= 16, f"{config} is too small"
    assert config.block_m >= per_kv, f"{config} is too small for {per_kv} heads per kv head"
    assert num_splits == next_power_of_two(num_splits), "num_splits must be a power of two"


def checked(
    scratch: AttentionScratch | None, tokens: int, num_heads: int, num_splits: int, value_dim: int
) -> AttentionScratch:
    """Returns the scratch memory of split contexts, after asserting that it is there and fits."""
    assert scratch is not None, "split contexts need scratch memory"
    assert scratch.sums.shape[0] >= tokens, "scratch is for fewer tokens"
    assert scratch.sums.shape[1:] == (num_heads, num_splits, value_dim), "scratch has another shape"
    for part in (scratch.sums, scratch.stats, scratch.counters):
        assert part.is_contiguous(), "scratch must be contiguous"
    return scratch


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Asserts that there is a sink for each head, if there are any."""
    if sinks is not None:
        assert sinks.shape == (num_heads,), "sinks: one for each head"
        assert sinks.is_contiguous(), "sinks must be contiguous"


def check_step(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    ends: Tensor | None = None,
) -> None:
    """Asserts that the tensors of a step and those of the cache fit together."""
    tokens, num_heads, dim = query.shape
    requests, value_dim = context_lens.shape[0], value_cache.shape[3]
    widest = max(dim, value_dim)
    assert widest <= MAX_HEAD_DIM, f"heads of {widest} elements; at most {MAX_HEAD_DIM}"
    assert out.shape == (tokens, num_heads, value_dim), "out: a value for each query head"
    assert key_cache.shape[3] == dim, "the cache has heads of another size"
    assert num_heads % key_cache.shape[2] == 0, "kv heads must divide the query heads"
    assert key_cache.shape[:3] == value_cache.shape[:3], "key_cache and value_cache differ in shape"
    assert key_cache.stride() == value_cache.stride(), "key_cache and value_cache differ in strides"
    assert key_cache.dtype is value_cache.dtype, "key_cache and value_cache differ in dtype"
    for tensor in (out, query, key_cache, value_cache):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
    assert out.dtype is query.dtype, "query and out have one dtype"
    assert block_table.shape[0] == requests, "block_table: one row per request"
    assert query_starts.shape == (requests + 1,), "query_starts: one more than requests"
    numbers = [block_table, query_starts, context_lens]
    if ends is not None:
        assert ends.shape == query.shape[:1], "ends: one for each token"
        numbers.append(ends)
    for tensor in numbers:
        assert tensor.dtype is torch.int32, "tables, lengths and ends are int32"
        assert tensor.stride(-1) == 1 or tensor.shape[-1] < 2, (
            "tables, lengths and ends are contiguous"
        )
