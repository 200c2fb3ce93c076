"""Decides which experts compute which tokens.

`route` chooses each token's experts, in ascending order, and lays the pairs of a token and an
expert out for `experts`, as `pair_layout` says. No kernel adds numbers atomically but those of
finished programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.functions import sigmoid, softplus
from shmllm_kernels.gpu.pair_layout import (
    PairLayout,
    count_and_lay_out,
    lays_out,
    most_tokens,
    num_chunks,
    operands_of,
    tokens_at_once,
)
from shmllm_kernels.gpu.pairs import check_room
from shmllm_kernels.reference import moe as plain
from shmllm_kernels.reference.moe import Choice

MAX_EXPERTS = 4096
NUM_WARPS = 8
SMALLEST_SHARE = tl.constexpr(plain.SMALLEST_SHARE)
SIGMOID = tl.constexpr(1)
SQRT_SOFTPLUS = tl.constexpr(2)


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
    """Makes the ranks of all groups of a token's experts but the best ones minus infinity."""
    groups = tl.arange(0, PADDED_GROUPS)[None, :]
    scores = tl.full((ranks.shape[0], PADDED_GROUPS), float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where(experts // PER_GROUP == group, ranks, float("-inf"))
        score = tl.max(own, axis=1)[:, None]
        if NUM_BEST == 2:
            first = tl.min(tl.where(own == score, experts, PADDED), axis=1)[:, None]
            score += tl.max(tl.where(experts == first, float("-inf"), own), axis=1)[:, None]
        score = tl.where(score != score, float("-inf"), score)
        scores = tl.where(groups == group, score, scores)
    left = _leave_best(scores, groups, groups < NUM_GROUPS, TOP_GROUPS, PADDED_GROUPS)
    for group in tl.static_range(NUM_GROUPS):
        is_left = tl.max(((groups == group) & left).to(tl.int32), axis=1)[:, None] > 0
        ranks = tl.where((experts // PER_GROUP == group) & is_left, float("-inf"), ranks)
    return ranks


@triton.jit
def _leave_best(ranks, numbers, inside, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Returns which columns of each row are not among the COUNT largest; of equal ones the lower
    number is larger.

    Args:
        ranks: [rows, PADDED], without NaN.
        numbers: [1, PADDED], the numbers of the columns.
        inside: [1, PADDED], which of these there are.
    """
    left = inside & (ranks == ranks)
    for _ in tl.static_range(COUNT):
        best = tl.max(tl.where(left, ranks, float("-inf")), axis=1)[:, None]
        first = tl.min(tl.where(left & (ranks == best), numbers, PADDED), axis=1)[:, None]
        left = left & (numbers != first)
    return left


@triton.jit
def _mixed_weights(
    logits, ranks, experts, inside, LIMIT: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr
):
    """Returns the weights of the COUNT best experts as SparseMixer has them, [rows, PADDED]."""
    left, weights = inside & (ranks == ranks), tl.zeros_like(ranks)
    for _ in tl.static_range(COUNT):
        best = tl.max(tl.where(left, ranks, float("-inf")), axis=1)[:, None]
        first = tl.min(tl.where(left & (ranks == best), experts, PADDED), axis=1)[:, None]
        gap = (best - logits) / tl.maximum(tl.abs(logits), best)
        near = left & ((gap > LIMIT) == 0)
        total = tl.sum(tl.where(near, tl.exp(logits - best), 0.0), axis=1)[:, None]
        weights = tl.where(experts == first, 1.0 / total, weights)
        left = left & (experts != first)
    return weights


@triton.jit
def scores_of(logits, SCORES: tl.constexpr):
    """Returns the scores of experts that do not depend on other logits."""
    return tl.sqrt(softplus(logits)) if SCORES == SQRT_SOFTPLUS else sigmoid(logits)


@triton.jit
def choose(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    scales_ptr,
    tokens,
    num_tokens,
    num_real,
    logits_stride,
    scale,
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
    TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    """Writes the experts of some tokens, [tokens, 1], and their weights.

    Args:
        num_tokens: the number of tokens with logits.
        num_real: the number of those that are not padding; the others get the expert -1.
        SCORES: see `scores_kind`.

    Returns:
        [tokens, PADDED], the pair of each token and expert, and which of these there are.
    """
    experts = tl.arange(0, PADDED)[None, :]
    is_token, inside = tokens < num_tokens, experts < NUM_EXPERTS
    source = logits_ptr + tokens.to(tl.int64) * logits_stride + experts
    logits = tl.load(source, mask=is_token & inside, other=float("-inf")).to(tl.float32)
    is_nan = logits != logits
    largest = tl.max(tl.where(is_nan, float("-inf"), logits), axis=1)[:, None]
    shares = scores_of(logits, SCORES) if SCORES else tl.exp(logits - largest)
    # Logits differ where their sigmoids are both 1.
    RANKS_SHARES: tl.constexpr = SCORES and not RANKS_LOGITS
    ranks = shares if RANKS_SHARES and (HAS_BIAS or NUM_GROUPS > 1) else logits
    BY_SHARES: tl.constexpr = HAS_BIAS and not SCORES
    if BY_SHARES:
        every = tl.sum(tl.where(inside & (shares == shares), shares, 0.0), axis=1)[:, None]
        ranks = shares / every
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
    chosen = inside & (_leave_best(ranks, experts, inside, TOP_K, PADDED) == 0)
    counted = inside if DIVIDES_BY_ALL else chosen
    total = tl.sum(tl.where(counted, shares, 0.0), axis=1)[:, None]
    if SCORES:
        total = 1.0 if DIVIDES_BY_ALL else total + TOTAL_EPS
    if BY_SHARES:
        total = tl.where(total < every * SMALLEST_SHARE, every * SMALLEST_SHARE, total)
    weights = shares / total
    if MIXER_LIMIT > 0:
        weights = _mixed_weights(logits, ranks, experts, inside, MIXER_LIMIT, TOP_K, PADDED)
    has_nan = tl.max(is_nan.to(tl.int32), axis=1)[:, None] > 0
    weights = tl.where(has_nan, float("nan"), weights * scale)
    if HAS_SCALES:
        weights *= tl.load(scales_ptr + experts, mask=inside, other=0.0).to(tl.float32)
    places = tokens.to(tl.int64) * TOP_K + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    exists = tokens < num_real
    tl.store(ids_ptr + places, tl.where(exists, experts, -1), mask=chosen & is_token)
    tl.store(weights_ptr + places, weights, mask=chosen & is_token)
    return places, chosen & exists & is_token


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "num_chunks", "block_m"])
def _route(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    scales_ptr,
    starts_ptr,
    layout,
    num_requests,
    num_tokens,
    num_chunks,
    block_m,
    logits_stride,
    scale,
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
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    num_real = tl.load(starts_ptr + num_requests)
    places, is_pair = choose(
        ids_ptr, weights_ptr, logits_ptr, bias_ptr, scales_ptr, tokens, num_tokens, num_real,
        logits_stride, scale, DIVIDES_BY_ALL, SCORES, RANKS_LOGITS, TOTAL_EPS, MIXER_LIMIT,
        HAS_BIAS, HAS_SCALES, NUM_GROUPS, TOP_GROUPS, NUM_BEST, NUM_EXPERTS, TOP_K, PADDED,
        PADDED_GROUPS,
    )  # fmt: skip
    if layout is not None:
        count_and_lay_out(
            layout, ids_ptr, places, is_pair, num_chunks, num_tokens * TOP_K, block_m,
            TOKENS * TOP_K, NUM_EXPERTS, PADDED, CHUNKS, PAIRS,
        )  # fmt: skip


def route(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    query_starts: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    layout: PairLayout | None = None,
) -> None:
    """Writes ``reference.moe.route(logits, top_k, choice, bias)``, and lays out the pairs of a step
    of few tokens. Padded tokens get the expert -1, whom nobody computes.

    Args:
        ids: [tokens, top_k] int32, contiguous; gets each token's experts in ascending order.
        weights: [tokens, top_k] float32, contiguous; gets the factors of their outputs.
        logits: [tokens, experts], each row contiguous; float32, float16 or bfloat16.
        query_starts: [requests + 1] int32, whose last number is that of the step's tokens.
        choice: how the experts are chosen.
        bias: [experts] float32, contiguous, or None.
        scales: [experts], any floating dtype, contiguous, what the weight of each chosen expert is
            multiplied by; or None.
        layout: where the pairs are laid out if `pair_layout.lays_out` these tokens; else nothing is
            written there. None: they are not laid out.

    One launch a layer. A program has 16 tokens of up to 512 experts, two in each warp, and passes
    top_k times over their logits in registers, and twice for each group: with 8 of 128 experts two
    reductions of 0.1 us each time, 1.6 us, and 0.6 us for the logits, so 3 us for a step of one
    program. `pair_layout.most_tokens` says what the layout adds: 0.3 us up to 16 tokens, 3.3 us up
    to 512. So 4 us, and 7 us; the launches for choice, scales, and two to sort took 2 us each.
    8,192 tokens have 512 programs, two at a time on each multiprocessor: 10 us.
    """
    tokens, top_k = ids.shape
    num_experts = logits.shape[1]
    check_routing(ids, weights, logits, choice, scales)
    count, most = num_chunks(tokens, num_experts), most_tokens(num_experts)
    is_laid_out = layout is not None and lays_out(tokens, num_experts)
    if layout is not None:
        check_room(layout.pairs, ids.numel(), num_experts, layout.block_m)
    if tokens == 0:
        if layout is not None:
            layout.pairs.num_blocks.zero_()
        return
    _route[(count,)](
        ids,
        weights,
        logits,
        weights if bias is None else bias,
        weights if scales is None else scales,
        query_starts,
        operands_of(layout),
        len(query_starts) - 1,
        tokens,
        count if is_laid_out else 0,
        0 if layout is None else layout.block_m,
        logits.stride(0),
        choice.scale,
        **constants_of(choice, bias, scales),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        TOKENS=tokens_at_once(num_experts),
        PADDED=next_power_of_two(num_experts),
        CHUNKS=next_power_of_two(num_chunks(most, num_experts)),
        PAIRS=next_power_of_two(most * top_k),
        num_warps=NUM_WARPS,
    )


def scores_kind(choice: Choice) -> int:
    """Returns how kernels know scores: 0, those of a softmax, SIGMOID or SQRT_SOFTPLUS."""
    kind = SQRT_SOFTPLUS if choice.is_sqrt_softplus else SIGMOID
    return int(kind.value) if choice.is_sigmoid else 0


def constants_of(
    choice: Choice, bias: Tensor | None, scales: Tensor | None
) -> dict[str, int | bool | float]:
    """Returns the constants of `choose` that do not depend on the number of experts."""
    return {
        "DIVIDES_BY_ALL": choice.divides_by_all,
        "SCORES": scores_kind(choice),
        "RANKS_LOGITS": choice.ranks_logits,
        "TOTAL_EPS": choice.total_eps,
        "MIXER_LIMIT": choice.mixer_limit,
        "HAS_BIAS": bias is not None,
        "HAS_SCALES": scales is not None,
        "NUM_GROUPS": choice.num_groups,
        "TOP_GROUPS": choice.top_groups,
        "NUM_BEST": choice.num_best,
        "PADDED_GROUPS": next_power_of_two(choice.num_groups),
    }


def check_routing(
    ids: Tensor, weights: Tensor, logits: Tensor, choice: Choice, scales: Tensor | None
) -> None:
    """Checks arguments of `route`."""
    (_, top_k), num_experts = ids.shape, logits.shape[1]
    assert weights.shape == ids.shape == (len(logits), top_k), "ids and weights: one row a token"
    assert ids.dtype is torch.int32, "ids are int32"
    assert weights.dtype is torch.float32, "weights are float32"
    assert ids.is_contiguous(), "ids must be contiguous"
    assert weights.is_contiguous(), "weights must be contiguous"
    assert logits.stride(1) == 1, "rows must be contiguous"
    assert 0 < top_k <= num_experts <= MAX_EXPERTS, f"{top_k} of {num_experts} experts"
    assert num_experts % choice.num_groups == 0, "groups have equally many experts"
    is_plain = choice.num_groups == 1 and not choice.is_sigmoid
    assert is_plain or not choice.mixer_limit, "SparseMixer reads logits, without groups"
    assert scales is None or scales.shape == (num_experts,), "scales: one for each expert"
    assert scales is None or scales.is_contiguous(), "scales must be contiguous"
