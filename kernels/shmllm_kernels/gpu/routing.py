"""Decides which experts compute which tokens, and adds up what these return.

`route` chooses each token's experts, `pairs` lays the pairs of a token and an expert out for
`experts`, and `combine` adds the pairs of each token. A token's result is the sum over its experts
in ascending order; it does not depend on the order of the pairs, and no kernel uses atomic
additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps
from shmllm_kernels.gpu.functions import sigmoid
from shmllm_kernels.reference import moe as plain
from shmllm_kernels.reference.moe import Choice

MAX_EXPERTS = 4096
COLUMNS_AT_ONCE = 1024
SMALLEST_TOTAL = tl.constexpr(plain.SMALLEST_TOTAL)


@triton.jit
def _keep_best_groups(
    ranks,
    experts,
    PER_GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    """Makes the ranks of all groups but the best ones minus infinity."""
    groups = tl.arange(0, PADDED_GROUPS)
    scores = tl.full((PADDED_GROUPS,), float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where(experts // PER_GROUP == group, ranks, float("-inf"))
        score = tl.max(own, axis=0)
        if NUM_BEST == 2:
            first = tl.min(tl.where(own == score, experts, PADDED), axis=0)
            score += tl.max(tl.where(experts == first, float("-inf"), own), axis=0)
        score = tl.where(score != score, float("-inf"), score)
        scores = tl.where(groups == group, score, scores)
    left = groups < NUM_GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(left, scores, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (scores == best), groups, PADDED_GROUPS), axis=0)
        left = left & (groups != first)
    for group in tl.static_range(NUM_GROUPS):
        is_left = tl.max(((groups == group) & left).to(tl.int32), axis=0) > 0
        ranks = tl.where((experts // PER_GROUP == group) & is_left, float("-inf"), ranks)
    return ranks


@triton.jit(do_not_specialize=["num_requests"])
def _route(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    starts_ptr,
    num_requests,
    logits_stride,
    scale,
    DIVIDES_BY_ALL: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PADDED)
    inside = experts < NUM_EXPERTS
    source = logits_ptr + token * logits_stride + experts
    logits = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    is_nan = logits != logits
    largest = tl.max(tl.where(is_nan, float("-inf"), logits), axis=0)
    shares = sigmoid(logits) if IS_SIGMOID else tl.exp(logits - largest)
    ranks = shares if IS_SIGMOID else logits
    if HAS_BIAS:
        ranks += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    ranks = tl.where(is_nan | (ranks != ranks) | (inside == 0), float("-inf"), ranks)
    if NUM_GROUPS > 1:
        ranks = _keep_best_groups(
            ranks,
            experts,
            NUM_EXPERTS // NUM_GROUPS,
            NUM_GROUPS,
            TOP_GROUPS,
            NUM_BEST,
            PADDED,
            PADDED_GROUPS,
        )
    left = inside
    for _ in tl.static_range(TOP_K):
        best = tl.max(tl.where(left, ranks, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (ranks == best), experts, PADDED), axis=0)
        left = left & (experts != first)
    chosen = inside & (left == 0)
    counted = inside if DIVIDES_BY_ALL else chosen
    total = tl.sum(tl.where(counted, shares, 0.0), axis=0)
    if IS_SIGMOID:
        total = 1.0 if DIVIDES_BY_ALL else total + SMALLEST_TOTAL
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    weights = tl.where(has_nan, float("nan"), shares / total * scale)
    places = token * TOP_K + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    exists = token < tl.load(starts_ptr + num_requests)
    tl.store(ids_ptr + places, tl.where(exists, experts, -1), mask=chosen)
    tl.store(weights_ptr + places, weights, mask=chosen)


@triton.jit
def _combine(
    out_ptr,
    rows_ptr,
    weights_ptr,
    shared_ptr,
    gates_ptr,
    out_stride,
    shared_stride,
    gates_stride,
    dim,
    HAS_SHARED: tl.constexpr,
    HAS_GATES: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        row = tl.load(rows_ptr + pair * dim + columns, mask=inside, other=0.0)
        total += tl.load(weights_ptr + pair) * row.to(tl.float32)
    if HAS_SHARED:
        row = tl.load(shared_ptr + token * shared_stride + columns, mask=inside, other=0.0)
        factor = 1.0
        if HAS_GATES:
            factor = sigmoid(tl.load(gates_ptr + token * gates_stride).to(tl.float32))
        total += factor * row.to(tl.float32)
    places = out_ptr + token * out_stride + columns
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=inside)


def route(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    query_starts: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
) -> None:
    """Writes ``reference.moe.route(logits, top_k, choice, bias)``; padded tokens get the expert -1,
    whom nobody computes.

    Args:
        ids: [tokens, top_k] int32, contiguous; gets each token's experts in ascending order.
        weights: [tokens, top_k] float32, contiguous; gets the factors of their outputs.
        logits: [tokens, experts], each row contiguous; float32, float16 or bfloat16.
        query_starts: [requests + 1] int32, whose last number is that of the step's tokens.
        choice: how the experts are chosen.
        bias: [experts] float32, contiguous, or None.

    One launch a layer, with a program for each token that passes top_k times over its logits in
    registers, and twice for each group: 2 us for one token, 10 us for 8,192 with 8 of 128 experts.
    """
    tokens, top_k = ids.shape
    num_experts = logits.shape[1]
    assert weights.shape == ids.shape == (len(logits), top_k), "ids and weights: one row a token"
    assert ids.dtype is torch.int32, "ids are int32"
    assert weights.dtype is torch.float32, "weights are float32"
    assert ids.is_contiguous(), "ids must be contiguous"
    assert weights.is_contiguous(), "weights must be contiguous"
    assert logits.stride(1) == 1, "rows must be contiguous"
    assert 0 < top_k <= num_experts <= MAX_EXPERTS, f"{top_k} of {num_experts} experts"
    assert num_experts % choice.num_groups == 0, "groups have equally many experts"
    if tokens == 0:
        return
    _route[(tokens,)](
        ids,
        weights,
        logits,
        weights if bias is None else bias,
        query_starts,
        len(query_starts) - 1,
        logits.stride(0),
        choice.scale,
        DIVIDES_BY_ALL=choice.divides_by_all,
        IS_SIGMOID=choice.is_sigmoid,
        HAS_BIAS=bias is not None,
        NUM_GROUPS=choice.num_groups,
        TOP_GROUPS=choice.top_groups,
        NUM_BEST=choice.num_best,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        PADDED=next_power_of_two(num_experts),
        PADDED_GROUPS=next_power_of_two(choice.num_groups),
        num_warps=row_warps(num_experts),
    )


def combine(
    out: Tensor,
    rows: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
) -> None:
    """Writes ``sum(weights[token, i] * rows[token, i]) + sigmoid(gate) * shared``, added in this
    order in float32.

    Args:
        out: [tokens, dim], each row contiguous.
        rows: [tokens, top_k, dim] contiguous, out's dtype, what each pair's expert returned.
        weights: [tokens, top_k] float32 contiguous.
        shared: [tokens, dim], each row contiguous, the output of the shared expert, or None.
        gates: [tokens], any stride; None: the factor of ``shared`` is 1.

    One launch a layer, which moves (top_k + 1) * tokens * dim elements, 36 KiB for a token with 8
    experts and 2,048 columns: 2 us for one token, 110 us for 8,192.
    """
    tokens, top_k, dim = rows.shape
    assert out.shape == (tokens, dim), "out: one row a token"
    assert weights.shape == (tokens, top_k), "weights: one for each pair"
    assert rows.is_contiguous(), "rows must be contiguous"
    assert weights.is_contiguous(), "weights must be contiguous"
    assert out.stride(1) == 1, "rows must be contiguous"
    assert rows.dtype is out.dtype, "rows must have out's dtype"
    if tokens == 0:
        return
    block = min(next_power_of_two(dim), COLUMNS_AT_ONCE)
    _combine[(tokens, triton.cdiv(dim, block))](
        out,
        rows,
        weights,
        out if shared is None else shared,
        weights if gates is None else gates,
        out.stride(0),
        0 if shared is None else shared.stride(0),
        0 if gates is None else gates.stride(0),
        dim,
        HAS_SHARED=shared is not None,
        HAS_GATES=gates is not None,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=row_warps(block),
    )


@triton.jit
def _scale_chosen(weights_ptr, ids_ptr, scales_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    ids = tl.load(ids_ptr + places, mask=inside, other=-1)
    scales = tl.load(scales_ptr + ids, mask=ids >= 0, other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + places, mask=inside, other=0.0)
    tl.store(weights_ptr + places, weights * scales, mask=inside & (ids >= 0))


def scale_chosen(weights: Tensor, ids: Tensor, scales: Tensor) -> None:
    """Multiplies the weight of each chosen expert by the scale of that expert, in place.

    Args:
        weights: [tokens, top_k] float32, contiguous.
        ids: [tokens, top_k] int32, contiguous; weights of negative ones stay.
        scales: [experts], any floating dtype, contiguous.

    One launch a layer, of a few KiB.
    """
    assert weights.shape == ids.shape, "weights: one for each id"
    assert weights.is_contiguous(), "weights must be contiguous"
    assert ids.is_contiguous(), "ids must be contiguous"
    if weights.numel() == 0:
        return
    grid = (triton.cdiv(weights.numel(), 256),)
    _scale_chosen[grid](weights, ids, scales, weights.numel(), BLOCK=256, num_warps=4)
