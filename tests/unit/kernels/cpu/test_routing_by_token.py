"""Experts whose scores are roots of softplus, and experts that a token's id chooses."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import run_kernel
from torch import Tensor
from torch.nn.functional import softplus

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.routing import ROUTE, ROUTE_BY_TOKEN, SIGMOID, SQRT_SOFTPLUS

EXPERTS, TOP_K, SCALE, EPS = 12, 3, 1.5, 1e-20
SCORES = {SIGMOID: torch.sigmoid, SQRT_SOFTPLUS: lambda x: softplus(x).sqrt()}
NUMBERS = word_of_float(SCALE), word_of_float(EPS)


def weights_of(scores: Tensor, ids: Tensor) -> Tensor:
    chosen = scores.gather(1, ids)
    return SCALE * chosen / (chosen.sum(1, keepdim=True) + EPS)


def test_scores_are_roots_of_softplus_and_a_bias_counts_for_the_choice_alone() -> None:
    logits, bias = torch.randn(50, EXPERTS) * 4, torch.randn(EXPERTS)
    ids, weights = torch.full((50, TOP_K), -1), torch.full((50, TOP_K), torch.nan)
    ranks = torch.full((50, EXPERTS + 1), torch.nan)
    operands = logits, 4 * EXPERTS, EXPERTS, TOP_K, 0, ids, weights, ranks, bias, 1, 1, 1
    run_kernel(ROUTE[SQRT_SOFTPLUS], 50, *operands, *NUMBERS)
    scores = softplus(logits.double()).sqrt()
    want = (scores + bias).topk(TOP_K).indices.sort().values
    assert torch.equal(ids, want)
    torch.testing.assert_close(weights.double(), weights_of(scores, want), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scoring", SCORES)
def test_a_tokens_id_chooses_its_experts(scoring: str) -> None:
    logits, tokens = torch.randn(50, EXPERTS) * 4, torch.randint(0, 30, (50,))
    table = torch.randint(0, EXPERTS, (30, TOP_K)).float()
    tokens[7] = -1  # its embedding was given
    ids, weights = torch.full((50, TOP_K), -1), torch.full((50, TOP_K), torch.nan)
    operands = logits, 4 * EXPERTS, EXPERTS, TOP_K, ids, weights, tokens, table
    run_kernel(ROUTE_BY_TOKEN[scoring], 50, *operands, *NUMBERS)
    want = table[tokens.clamp(min=0)].long().sort().values
    assert torch.equal(ids, want)
    scores = SCORES[scoring](logits.double())
    torch.testing.assert_close(weights.double(), weights_of(scores, want), atol=1e-6, rtol=1e-5)


def test_numbers_of_no_expert_stay_within_the_experts() -> None:
    table = torch.tensor([[float("nan"), -5.0, 1e30]])
    logits, tokens = torch.randn(1, EXPERTS), torch.zeros(1, dtype=torch.int64)
    ids, weights = torch.full((1, TOP_K), -1), torch.full((1, TOP_K), torch.nan)
    operands = logits, 4 * EXPERTS, EXPERTS, TOP_K, ids, weights, tokens, table
    run_kernel(ROUTE_BY_TOKEN[SIGMOID], 1, *operands, *NUMBERS)
    assert ids.tolist() == [[0, 0, EXPERTS - 1]]
