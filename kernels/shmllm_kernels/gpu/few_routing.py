"""The choice of the experts of few tokens in one launch: norm, router, choice and layout.

A program multiplies the normalised rows of some tokens with some rows of the router (`kept_rows`).
The one that ends last chooses by the logits of all, as `routing` does. Other programs store the
normalised rows that the experts read, whose norm may be another one. A dependent launch (from
compute capability 9.0 on) loads the router before it waits for the launch before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.decode_parts import is_last_part
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.kept_rows import (
    WEIGHTS_PER_WARP,
    load_rows,
    multiply,
    tokens_per_program,
)
from shmllm_kernels.gpu.norm import normed_row
from shmllm_kernels.gpu.pair_layout import PairLayout, lay_out_alone, operands_of
from shmllm_kernels.gpu.pairs import check_room
from shmllm_kernels.gpu.routing import check_routing, choose, constants_of
from shmllm_kernels.gpu.row_operands import RowNorm
from shmllm_kernels.reference.moe import Choice

MAX_EXPERTS = 512
"""The logits of MAX_ROWS tokens are 32 numbers of each thread."""
PER_PROCESSOR = 2
"""How many programs run at once on a multiprocessor: choosing among MAX_EXPERTS takes 255
registers."""
LEAST_WARPS = 4


@triton.jit
def _row_of(
    x_ptr, norm, eps, offset, factor, HAS_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_FACTOR: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns a token's row, normalised, multiplied and rounded to its dtype, and 0 behind it."""
    ks = tl.arange(0, K_PADDED)
    x = tl.load(x_ptr + ks, mask=ks < K, other=0.0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if HAS_NORM:
        x = normed_row(x.to(tl.float32), norm, K, eps, offset, HAS_OFFSET, dtype)
    if HAS_FACTOR:
        x = (x.to(tl.float32) * factor).to(dtype)
    return x


@triton.jit
def _store_normed(
    normed_ptr, x_ptr, norm, first_token, last_token, normed_stride, x_stride, eps, offset,
    HAS_OFFSET: tl.constexpr, IS_DEPENDENT: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores the normalised rows of some tokens, behind the wait for the launch before."""
    if IS_DEPENDENT:
        gdc_wait()
    ks = tl.arange(0, K_PADDED)
    for token in range(first_token, last_token):
        source = x_ptr + token * x_stride
        normed = _row_of(source, norm, eps, offset, 1.0, True, HAS_OFFSET, False, K, K_PADDED)
        tl.store(normed_ptr + token * normed_stride + ks, normed, mask=ks < K)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "tokens_at_once", "block_m"])
def _route_rows(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    normed_ptr,
    x_ptr,
    norm_ptr,
    experts_norm_ptr,
    router_ptr,
    router_bias_ptr,
    bias_ptr,
    scales_ptr,
    starts_ptr,
    counter_ptr,
    layout,
    num_requests,
    num_tokens,
    tokens_at_once,
    block_m,
    x_stride,
    normed_stride,
    logits_stride,
    eps,
    offset,
    factor,
    scale,
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_ROUTER_BIAS: tl.constexpr,
    DIVIDES_BY_ALL: tl.constexpr,
    SCORES: tl.constexpr,
    RANKS_LOGITS: tl.constexpr,
    TOTAL_EPS: tl.constexpr,
    MIXER_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    BLOCKS: tl.constexpr = (NUM_COLUMNS + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first_token = tl.program_id(1) * tokens_at_once
    last_token = tl.minimum(first_token + tokens_at_once, num_tokens)
    if IS_DEPENDENT:
        gdc_launch_dependents()
    ks = tl.arange(0, K_PADDED)
    norm = 0.0
    if HAS_NORM:
        own_norm_ptr = norm_ptr
        if experts_norm_ptr is not None:
            own_norm_ptr = tl.where(program == BLOCKS, experts_norm_ptr, norm_ptr)
        norm = tl.load(own_norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
    if program == BLOCKS:
        _store_normed(
            normed_ptr, x_ptr, norm, first_token, last_token, normed_stride, x_stride, eps, offset,
            HAS_OFFSET, IS_DEPENDENT, K, K_PADDED,
        )  # fmt: skip
    else:
        columns = program * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < NUM_COLUMNS
        router = load_rows(router_ptr, columns, NUM_COLUMNS, K, K_PADDED)
        router_bias = tl.zeros((BLOCK_N,), tl.float32)
        if HAS_ROUTER_BIAS:
            router_bias += tl.load(router_bias_ptr + columns, mask=is_column, other=0.0)
        if IS_DEPENDENT:
            gdc_wait()
        dtype: tl.constexpr = logits_ptr.dtype.element_ty
        for token in range(first_token, last_token):
            row = _row_of(
                x_ptr + token * x_stride, norm, eps, offset, factor, HAS_NORM, HAS_OFFSET,
                HAS_FACTOR, K, K_PADDED,
            )  # fmt: skip
            logits = multiply(router, row) + router_bias
            target = logits_ptr + token * logits_stride + columns
            tl.store(target, logits.to(dtype), mask=is_column)
        if is_last_part(counter_ptr, BLOCKS * tl.num_programs(1)):
            tokens = tl.arange(0, TOKENS)[:, None]
            found, is_pair = choose(
                ids_ptr, weights_ptr, logits_ptr, bias_ptr, scales_ptr, tokens, num_tokens,
                tl.load(starts_ptr + num_requests), logits_stride, scale, DIVIDES_BY_ALL,
                SCORES, RANKS_LOGITS, TOTAL_EPS, MIXER_LIMIT, HAS_BIAS, HAS_SCALES, NUM_GROUPS,
                TOP_GROUPS, NUM_BEST, NUM_EXPERTS, TOP_K, PADDED, PADDED_GROUPS,
            )  # fmt: skip
            if layout is not None:
                lay_out_alone(layout, found, is_pair, block_m, PADDED)


def takes(num_experts: int) -> bool:
    """Returns whether one launch can choose among so many experts."""
    return num_experts <= MAX_EXPERTS


def route_rows(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    num_experts: int,
    normed: Tensor,
    x: Tensor,
    norm: RowNorm | None,
    router: Tensor,
    router_bias: Tensor | None,
    query_starts: Tensor,
    counter: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    layout: PairLayout | None = None,
    is_dependent: bool = False,
    factor: float = 1.0,
    experts_norm: RowNorm | None = None,
) -> None:
    """Computes `norm.rms_norm`, the product with the router, and `routing.route`.

    Args:
        ids, weights, query_starts, choice, bias, scales: see `routing.route`.
        logits: [tokens, columns], each row contiguous, the dtype of ``router``: get its product.
        num_experts: how many of the columns are experts, as `takes`; behind them may be the gate of
            a shared one.
        normed: [tokens, hidden], each row contiguous; gets the norm of ``x`` that experts read,
            rounded to x's dtype, if there is one.
        x: [tokens, hidden], each row contiguous: float32, float16 or bfloat16. At most MAX_ROWS.
        norm: an RMSNorm; None: ``x`` is read as it is.
        router: [columns, hidden], contiguous; x's dtype or float32.
        router_bias: [columns], contiguous, or None.
        counter: [1] int32, 0 before and after the launch.
        layout: where the pairs are laid out; None: they are not.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0. Router and norms must be complete by then.
        factor: what the router's rows are multiplied by, behind their norm; they are rounded before
            and after that.
        experts_norm: the RMSNorm of what experts read, with the eps and the offset of ``norm``;
            None: that is ``norm``.

    One launch a layer. For Qwen3-30B-A3B (128 experts, 2,048) 32 programs read 0.5 MB of the router
    before they wait; then the rows arrive in 0.6 us, the sums take 0.3 us, the counter 0.6 us, the
    logits 0.6 us and the choice, of two tokens in each warp, 1.6 us: about 4 us. Each of up to
    eight tokens has 32 programs of its own. Norm, product and choice were launches of 2, 3 and 4
    us.
    """
    num_tokens, top_k = ids.shape
    columns, hidden = router.shape
    check_routing(ids, weights, logits[:, :num_experts], choice, scales)
    _check(logits, normed, x, norm, router, router_bias)
    if experts_norm is not None:
        assert norm is not None, "what experts read has a norm, and so has what the router reads"
        assert (experts_norm.eps, experts_norm.offset) == (norm.eps, norm.offset), "one eps"
        experts_norm.check(x.shape[1])
    assert num_tokens <= MAX_ROWS, f"{num_tokens} tokens; at most {MAX_ROWS}"
    assert takes(num_experts), f"{num_experts} experts; at most {MAX_EXPERTS}"
    if layout is not None:
        check_room(layout.pairs, ids.numel(), num_experts, layout.block_m)
    if num_tokens == 0:
        if layout is not None:
            layout.pairs.num_blocks.zero_()
        return
    padded = next_power_of_two(hidden)
    num_warps = max(padded // WEIGHTS_PER_WARP, LEAST_WARPS)
    block_n = num_warps * WEIGHTS_PER_WARP // padded
    programs = triton.cdiv(columns, block_n) + (0 if norm is None else 1)
    at_once = tokens_per_program(num_tokens, programs, PER_PROCESSOR, x.device)
    _route_rows[programs, triton.cdiv(num_tokens, at_once)](
        ids,
        weights,
        logits,
        normed,
        x,
        x if norm is None else norm.weight,
        None if experts_norm is None else experts_norm.weight,
        router,
        x if router_bias is None else router_bias,
        weights if bias is None else bias,
        weights if scales is None else scales,
        query_starts,
        counter,
        operands_of(layout),
        len(query_starts) - 1,
        num_tokens,
        at_once,
        0 if layout is None else layout.block_m,
        x.stride(0),
        normed.stride(0),
        logits.stride(0),
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        factor,
        choice.scale,
        HAS_NORM=norm is not None,
        HAS_OFFSET=norm is not None and norm.offset != 0,
        HAS_FACTOR=factor != 1,
        HAS_ROUTER_BIAS=router_bias is not None,
        **constants_of(choice, bias, scales),
        NUM_EXPERTS=num_experts,
        NUM_COLUMNS=columns,
        TOP_K=top_k,
        TOKENS=MAX_ROWS,
        PADDED=next_power_of_two(num_experts),
        K=hidden,
        K_PADDED=padded,
        BLOCK_N=block_n,
        IS_DEPENDENT=is_dependent,
        num_warps=num_warps,
        **({"launch_pdl": True} if is_dependent else {}),
    )


def _check(
    logits: Tensor,
    normed: Tensor,
    x: Tensor,
    norm: RowNorm | None,
    router: Tensor,
    router_bias: Tensor | None,
) -> None:
    columns, hidden = router.shape
    assert x.shape == normed.shape == (len(logits), hidden), "x and normed: as long as the router"
    assert logits.shape[1] == columns, "logits: one for each row of the router"
    for tensor in (x, normed, logits):
        assert tensor.stride(1) == 1, "rows must be contiguous"
    assert normed.dtype is x.dtype, "x and its norm have one dtype"
    assert logits.dtype is router.dtype, "logits have the router's dtype"
    assert router.is_contiguous(), "the router must be contiguous"
    assert router_bias is None or router_bias.is_contiguous(), "the bias must be contiguous"
    if norm is not None:
        assert not norm.has_mean, "an RMSNorm"
        norm.check(hidden)
