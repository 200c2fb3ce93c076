"""Attention of a step in which each request has few tokens, with what would be launches around it.

A program computes the query heads that share one kv head, of all new tokens of a request, for a
part of its context. It normalises and rotates these heads itself. The program of the first part
does so with the request's new keys, writes keys and values to the cache, and attends to them in
registers: no program reads what another one writes. Of a split context the program that ends last
joins the parts, in their order, so that the bits do not depend on which one that is.

A dependent launch (from compute capability 9.0 on) can load its first keys and values before it
waits for the launch before, whose result it needs for queries and the new key only. They take
registers, of which a launch with many programs needs the room for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.gpu.attention import (
    AttentionScratch,
    check_sinks,
    check_step,
    check_tiles,
    checked,
    padded_dim,
    scales_of,
)
from shmllm_kernels.gpu.configs import AttentionConfig, next_power_of_two
from shmllm_kernels.gpu.decode_attention_kernel import attend_decodes
from shmllm_kernels.gpu.decode_operands import (
    HeadNumbers,
    HeadStrides,
    LayerHeads,
    PartMemory,
    Step,
)
from shmllm_kernels.gpu.decode_parts import Gates
from shmllm_kernels.gpu.float8 import as_stored
from shmllm_kernels.gpu.rope_write import weights_of
from shmllm_kernels.gpu.rotated_heads import norm_order
from shmllm_kernels.gpu.weights_ahead import WeightsAhead
from shmllm_kernels.reference.rope_write import HeadNorms, QueryGrowth
from shmllm_kernels.windows import Window, window_number

MAX_TOKENS = 16
"""The most tokens of a request in a step, whose keys are one operand of a product."""
JOINED_ELEMENTS = 8192
"""How many elements of parts a program joins at once, which are in registers."""


def decode_attention(
    out: Tensor,
    heads: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    slots: Tensor,
    config: AttentionConfig,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norms: HeadNorms | None = None,
    interleaved: bool = False,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 1,
    scratch: AttentionScratch | None = None,
    max_tokens: int = 1,
    loads_first: bool = False,
    is_dependent: bool = False,
    gates: Tensor | None = None,
    growth: QueryGrowth | None = None,
    ahead: WeightsAhead | None = None,
    sees_new: bool = True,
    values: Tensor | None = None,
) -> None:
    """Computes ``reference.rope_write.rope_and_write`` and the causal
    ``reference.attention.paged_attention`` of a step with few tokens a request: one of a decode, or
    a known one and drafted ones behind it. With gates it multiplies the result by their sigmoids;
    the factors and the product are rounded to the dtype.

    Args:
        out: [tokens, num_heads, value_dim], heads and elements contiguous.
        heads: [tokens, num_heads + 2 * num_kv_heads, dim], query, key and value heads, contiguous
            but for the tokens; float32, float16 or bfloat16. Or [tokens, num_heads, dim], query
            heads, where an earlier layer has written keys and values of these tokens to the cache.
        key_cache, value_cache, block_table, query_starts, context_lens: see `paged_attention`; a
            request has 1 to ``max_tokens`` tokens, or none if it is padding. A ``block_table`` of
            [requests, num_kv_heads, max_blocks] has blocks for each kv head.
        slots: [tokens] int64; the keys and values of a token whose slot is -1 are not written. If
            an earlier layer has written them, only padding may have none.
        config: tile sizes and numbers of warps, from `configs.attention_config`.
        scale, window, soft_cap, sinks: see `paged_attention`.
        cos: [tokens, rotary_dim], the last dimension contiguous. Only the second half is read.
            None: nothing is rotated.
        sin: as ``cos``.
        norms: norms of each head, with weights of [dim], or [num_heads, dim] and
            [num_kv_heads, dim], or weights and biases of [2, dim], or of all heads side by side,
            with weights of [num_heads * dim] and [num_kv_heads * dim]; None: heads have none.
        interleaved: whether neighbouring elements are rotated together.
        num_splits: the number of parts that each context is split into; a power of two.
        scratch: memory for at least ``tokens`` tokens and exactly ``num_splits`` splits, whose
            counters are 0, as the launch leaves them; None if ``num_splits`` is 1.
        max_tokens: the largest number of tokens of a request, at most MAX_TOKENS. With more than
            one, the config is from `configs.verify_config`.
        loads_first: whether a program loads its first keys and values before its queries, and in
            a dependent launch before it waits.
        is_dependent: whether the launch may begin before the launch before it has ended, from
            compute capability 9.0 on. Everything but ``heads``, the angles and the gates must be
            complete by then.
        gates: [tokens, num_heads, value_dim], contiguous but for the tokens, in the dtype of
            ``heads``, in whose rows they may be; None: there are none.
        growth: the factor of rotated queries; None: they have none.
        ahead: the weights that the L2 cache is asked for, from compute capability 9.0 on; None:
            none.
        sees_new: whether the last of the ``context_lens`` positions are those of the tokens
            themselves. Otherwise each request has one token, which attends to all of these, such as
            those of an encoder, and ``heads`` are query heads.
        values: [tokens, num_kv_heads, value_dim], value heads in the same rows as ``heads``, which
            are query and key heads then; None: the last ones of ``heads`` are values.

    With norms of all heads side by side each program reads those of its tokens, once more: 16 KiB a
    token with 32 query and 32 kv heads of 128, from the L2 cache.

    One launch a layer, whatever the number of splits. It reads the keys and values of each request
    once: 2 MiB for one request of Llama-3.2-1B at a context of 1,024, 0.5 us; what follows one
    another after the wait (queries, a tile, the parts' sums, their join) takes about 4 us.

    With four drafted tokens behind the known one, on a card of 132 multiprocessors that copies
    4.26 TB/s, a request at a context of 1,024 has 5 * 4 rows, and 8 parts for each of 8 kv heads:
    64 programs in one wave. A graph of 8 tokens launches 1,984 more, for padding and for parts of
    longer contexts; they return after a load, in 8 to 10 waves of 0.5 us, at the same time.

    - Llama-3.1-8B: 4 MiB of keys and values take 1.0 us. A program reads 64 KiB in two tiles, and
      stores 10 KiB of sums. The last one of a kv head reads 80 KiB, 1.3 us at 60 bytes a ns, in two
      rounds of 0.7 us. Behind lengths, table, a tile beside the heads, another tile, products and
      the counter, which follow one another, it ends after 7 us. Three launches take 10 us.
    - Llama-3.2-1B: half the bytes, 0.5 us; the join takes 2.1 us, and the launch 6 us.
    """
    tokens, num_heads, value_dim = out.shape
    requests, (num_kv_heads, dim) = context_lens.shape[0], key_cache.shape[2:]
    step = key_cache, value_cache, block_table, query_starts, context_lens
    check_step(out, heads[:, :num_heads], *step)
    has_keys = heads.shape[1] > num_heads
    if values is None:
        values = heads[:, -num_kv_heads:] if has_keys else out[:, :num_kv_heads]
        heads = heads[:, :-num_kv_heads] if has_keys else heads
    _check(out, heads, values, num_kv_heads, slots)
    _check_gates(gates, out)
    assert 1 <= max_tokens <= MAX_TOKENS, f"a request of {max_tokens} tokens: at most {MAX_TOKENS}"
    per_kv = num_heads // num_kv_heads
    check_tiles(config, per_kv * max_tokens, num_splits)
    check_sinks(sinks, num_heads)
    if tokens == 0 or requests == 0:
        return
    memory = PartMemory(out, out, slots)
    if num_splits > 1:
        scratch = checked(scratch, tokens, num_heads, num_splits, value_dim)
        assert len(scratch.counters) >= requests * num_kv_heads, "scratch has too few counters"
        memory = PartMemory(scratch.sums, scratch.stats, scratch.counters)
    of_cos, of_sin = (slots, slots) if cos is None or sin is None else (cos, sin)
    assert norms is None or norms.key is not None or not has_keys, "keys have a norm, too"
    assert sees_new or (max_tokens == 1 and not has_keys), "one token attends to others alone"
    is_of_head = norms is None or norms.query.dim() == 2 or norms.query.shape == (dim,)
    if norms is not None and not is_of_head:
        assert not norms.is_behind, "a norm behind the rotation is one over each head"
        assert not norms.is_centered, "a LayerNorm is one over each head"
    query_weight, key_weight = weights_of(norms, (num_heads, num_kv_heads), dim, heads)
    block_stride, token_stride, kv_head_stride, _ = key_cache.stride()
    attend_decodes[(requests * num_kv_heads, num_splits)](
        LayerHeads(
            out,
            heads,
            values,
            as_stored(key_cache, heads.dtype),
            as_stored(value_cache, heads.dtype),
            block_table,
            slots,
            of_cos,
            of_sin,
            query_weight,
            key_weight,
            out if sinks is None else sinks,
        ),
        Step(query_starts, context_lens),
        memory,
        HeadNumbers(
            *scales_of(scale, soft_cap),
            0.0 if norms is None else norms.eps,
            0.0 if norms is None else norms.offset,
        ),
        window_number(window),
        HeadStrides(
            out.stride(0),
            heads.stride(0),
            of_cos.stride(0),
            of_sin.stride(0),
            block_stride,
            token_stride,
            kv_head_stride,
            block_table.stride(0),
            0 if block_table.dim() == 2 else block_table.stride(1),
        ),
        None if gates is None else Gates(gates, gates.stride(0)),
        growth,
        None if ahead is None else ahead.as_arguments(),
        **constants_of(config, num_heads, num_kv_heads, (dim, value_dim), num_splits, max_tokens),
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        ROTARY_HALF=0 if cos is None else cos.shape[-1] // 2,
        IS_INTERLEAVED=interleaved,
        NORM=norm_order(norms),
        ROUNDS_ONCE=norms is not None and norms.rounds_once,
        CENTERING=0 if norms is None else norms.centering,
        HAS_OWN_NORMS=norms is not None and not norms.has_bias and norms.query.shape != (dim,),
        NORM_TOKENS=0 if is_of_head else next_power_of_two(max_tokens),
        HAS_VALUE_NORM=norms is not None and norms.has_values,
        BLOCK_SIZE=key_cache.shape[1],
        HAS_KEYS=has_keys,
        SEES_NEW=sees_new,
        LOADS_FIRST=loads_first,
        IS_DEPENDENT=is_dependent,
        **config.launch_options,
        **({"launch_pdl": True} if is_dependent else {}),
    )


def constants_of(
    config: AttentionConfig,
    num_heads: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    num_splits: int,
    max_tokens: int,
) -> dict[str, int]:
    """Returns the constants of a kernel that depend on tiles, heads, splits and tokens. dims: the
    widths of a key and of a value."""
    per_kv, (dim, value_dim) = num_heads // num_kv_heads, dims
    most = max(JOINED_ELEMENTS // (num_splits * padded_dim(value_dim)), 1)
    return {
        "NUM_SPLITS": num_splits,
        "NUM_KV_HEADS": num_kv_heads,
        "HEADS_PER_KV": per_kv,
        "BLOCK_M": config.block_m,
        "TILE": config.tile,
        "DIM": dim,
        "DIM_PADDED": padded_dim(dim),
        "VALUE_DIM": value_dim,
        "VALUE_PADDED": padded_dim(value_dim),
        "MAX_TOKENS": max_tokens,
        "NEW_KEYS": 1 if max_tokens == 1 else MAX_TOKENS,
        # The sums of a part are not more bytes than its keys and values. Those of several tokens
        # are half as many: one program reads those of all parts.
        "FEWEST_KEYS": (2 if max_tokens == 1 else 4) * config.block_m,
        "HEADS_AT_ONCE": min(most, next_power_of_two(per_kv)),
    }


def _check(out: Tensor, heads: Tensor, values: Tensor, num_kv_heads: int, slots: Tensor) -> None:
    tokens, num_heads, value_dim = out.shape
    count, dim = heads.shape[1:]
    assert count in (num_heads, num_heads + num_kv_heads), "heads: query, key, value, or query"
    assert values.shape == (tokens, num_kv_heads, value_dim), "values: one for each kv head"
    assert heads.stride()[1:] == (dim, 1), "heads must be contiguous"
    assert out.stride()[1:] == values.stride()[1:] == (value_dim, 1), "heads must be contiguous"
    if count > num_heads and tokens > 1:
        assert values.stride(0) == heads.stride(0), "values are in the rows of heads"
    assert values.dtype is heads.dtype, "values have the dtype of heads"
    assert dim % 2 == 0, f"a head of {dim} elements has no halves"
    assert slots.shape == (tokens,), "slots: one per token"
    assert slots.dtype is torch.int64, "slots are int64"


def _check_gates(gates: Tensor | None, out: Tensor) -> None:
    if gates is not None:
        assert gates.shape == out.shape, "gates: one for each element of the result"
        assert gates.stride()[1:] == out.stride()[1:], "gates must be contiguous"
        assert gates.dtype is out.dtype, "all floating tensors have one dtype"
