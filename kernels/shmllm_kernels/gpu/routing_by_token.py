"""Experts that a token's id chooses (hash layers; Roller et al., 2021), whose weights depend on the
router's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.routing import check_routing, scores_kind, scores_of
from shmllm_kernels.gpu.row_copies import source_of
from shmllm_kernels.reference.moe import Choice


@triton.jit(do_not_specialize=["num_requests"])
def _route_by_token(
    ids_ptr, weights_ptr, logits_ptr, tokens_ptr, last_tokens_ptr, table_ptr, starts_ptr,
    num_requests, logits_stride, scale,
    SCORES: tl.constexpr, TOTAL_EPS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    own = source_of(tokens_ptr, last_tokens_ptr, token, True, HAS_SAMPLED=True)
    own = tl.maximum(own, 0).to(tl.int64)
    choices = tl.arange(0, PADDED)
    is_choice = choices < TOP_K
    named = tl.load(table_ptr + own * TOP_K + choices, mask=is_choice, other=0.0)
    named = tl.where(named == named, named, 0.0)
    experts = tl.minimum(tl.maximum(named, 0.0), NUM_EXPERTS - 1).to(tl.int32)
    logits = tl.load(logits_ptr + token * logits_stride + experts, mask=is_choice, other=0.0)
    shares = tl.where(is_choice, scores_of(logits.to(tl.float32), SCORES), 0.0)
    weights = shares / (tl.sum(shares, axis=0) + TOTAL_EPS) * scale
    ranks = tl.where(is_choice, experts, NUM_EXPERTS)
    is_less = ranks[None, :] < ranks[:, None]
    is_before = (ranks[None, :] == ranks[:, None]) & (choices[None, :] < choices[:, None])
    places = token * TOP_K + tl.sum((is_less | is_before).to(tl.int32), axis=1)
    exists = token < tl.load(starts_ptr + num_requests)
    tl.store(ids_ptr + places, tl.where(exists, experts, -1), mask=is_choice)
    tl.store(weights_ptr + places, weights, mask=is_choice)


def route_by_token(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    query_starts: Tensor,
    choice: Choice,
    token_ids: Tensor,
    last_tokens: Tensor,
    table: Tensor,
) -> None:
    """Writes ``reference.moe.route_by_token(logits, token_ids, table, choice)``. Padded tokens get
    the expert -1, whom nobody computes.

    Args:
        ids, weights, logits, query_starts: see `routing.route`.
        choice: scores do not depend on other logits, and are divided by their sum.
        token_ids: [tokens], contiguous, as those of `row_copies.embed`.
        last_tokens: [rows] int64, the token that was last sampled for each row.
        table: [ids, top_k] float32, contiguous, the experts of each id.

    One launch a layer, with a program for each token, which reads a row of the table and as many
    logits: 2 us. The pairs are sorted by a launch of their own.
    """
    tokens, top_k = ids.shape
    check_routing(ids, weights, logits, choice, None)
    assert choice.is_sigmoid, "scores do not depend on other logits"
    assert not choice.divides_by_all, "weights are divided by their sum"
    assert token_ids.shape == (tokens,), "token_ids: one for each token"
    assert table.shape[1] == top_k, "table: as many experts for each id"
    assert table.dtype is torch.float32, "the table is float32"
    assert last_tokens.dtype is torch.int64, "tokens are int64"
    for tensor in (token_ids, last_tokens, table):
        assert tensor.is_contiguous(), "all must be contiguous"
    if tokens == 0:
        return
    _route_by_token[(tokens,)](
        ids, weights, logits, token_ids, last_tokens, table, query_starts, len(query_starts) - 1,
        logits.stride(0), choice.scale, SCORES=scores_kind(choice), TOTAL_EPS=choice.total_eps,
        NUM_EXPERTS=logits.shape[1], TOP_K=top_k, PADDED=next_power_of_two(top_k), num_warps=1,
    )  # fmt: skip
