"""The choice of experts on a CPU: compared with torch, and defined for every logit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.reference import moe
from tests.support.moe_helpers import MoERun

SHAPES = [(1, 1), (4, 1), (8, 2), (16, 16), (60, 4), (128, 8)]
"""Numbers of experts, and of experts for each token."""


def routed(logits: Tensor, top_k: int, divides_by_all: bool = True) -> MoERun:
    run = MoERun(logits.shape[1], top_k, len(logits))
    run.route(logits, divides_by_all)
    return run


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 100])
def test_softmax_of_all_then_top_k_equals_torchs(
    num_experts: int, top_k: int, num_tokens: int
) -> None:
    logits = torch.randn(num_tokens, num_experts) * 3
    run = routed(logits, top_k)
    values, ids = F.softmax(logits.double(), -1).topk(top_k)
    order = ids.argsort(-1)
    assert torch.equal(run.ids, ids.gather(-1, order))
    torch.testing.assert_close(run.weights.double(), values.gather(-1, order), atol=1e-7, rtol=2e-6)


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
def test_top_k_then_softmax_equals_torchs_and_the_divided_softmax(
    num_experts: int, top_k: int
) -> None:
    logits = torch.randn(50, num_experts) * 3
    run = routed(logits, top_k, divides_by_all=False)
    values, ids = logits.double().topk(top_k)
    order = ids.argsort(-1)
    shares = F.softmax(logits.double(), -1).gather(-1, ids)
    for expected in (values.softmax(-1), shares / shares.sum(-1, keepdim=True)):
        torch.testing.assert_close(
            run.weights.double(), expected.gather(-1, order), atol=1e-7, rtol=2e-6
        )
    assert torch.equal(run.ids, ids.gather(-1, order))


@pytest.mark.parametrize("divides_by_all", [False, True])
def test_the_reference_agrees_on_ties_and_numbers_that_are_not_finite(
    divides_by_all: bool,
) -> None:
    """Logits from a few values only: ties, infinities and NaN in most rows."""
    palette = torch.tensor([0.0, 1.0, 1.0, -2.0, math.inf, -math.inf, math.nan])
    logits = palette[torch.randint(0, len(palette), (400, 12))]
    logits[0], logits[1], logits[2] = math.nan, -math.inf, 5.0
    for top_k in (1, 4, 12):
        run = routed(logits, top_k, divides_by_all)
        ids, weights = moe.route(logits.double(), top_k, divides_by_all)
        assert torch.equal(run.ids, ids)
        torch.testing.assert_close(run.weights.double(), weights, equal_nan=True)


def test_equal_logits_choose_the_lower_expert() -> None:
    assert routed(torch.zeros(5, 20), 3).ids.tolist() == [[0, 1, 2]] * 5
    logits = torch.tensor([[0.0, 7.0, 1.0, 7.0, 7.0, 1.0]])
    assert routed(logits, 2).ids.tolist() == [[1, 3]]
    assert routed(logits, 4).ids.tolist() == [[1, 2, 3, 4]]


def test_a_nan_is_chosen_last_and_makes_the_tokens_weights_nan() -> None:
    logits = torch.randn(3, 6)
    logits[1] = torch.tensor([math.nan, -9.0, math.nan, 1.0, math.nan, 0.0])
    for divides_by_all in (False, True):
        run = routed(logits, 3, divides_by_all)
        assert run.ids[1].tolist() == [1, 3, 5]
        assert run.weights[1].isnan().all()
        assert run.weights[[0, 2]].isfinite().all()
    logits[1] = math.nan
    assert routed(logits, 3).ids[1].tolist() == [0, 1, 2]


def test_a_token_is_routed_alone_as_among_others() -> None:
    logits = torch.randn(77, 32)
    together = routed(logits, 4)
    for token in range(77):
        alone = routed(logits[token : token + 1].clone(), 4)
        assert torch.equal(alone.ids[0], together.ids[token])
        assert torch.equal(alone.weights[0], together.weights[token])


def check_sorted(run: MoERun) -> None:
    """Compares the order of the pairs with a stable sort, and the blocks with the order."""
    experts, order = run.ids.flatten().sort(stable=True)
    assert torch.equal(run.tokens, order // run.top_k)
    assert torch.equal(run.places.flatten()[order], torch.arange(len(order)))
    covered: list[int] = []
    for expert, first, count in run.blocks:
        assert 0 < count <= ROWS_AT_ONCE
        assert first == len(covered)
        covered += [expert] * count
    assert covered == experts.tolist()


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 150])
def test_pairs_are_sorted_by_expert_and_token(
    num_experts: int, top_k: int, num_tokens: int
) -> None:
    run = routed(torch.randn(num_tokens, num_experts), top_k)
    run.sort()
    check_sorted(run)


@pytest.mark.parametrize("count", [1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 3 * ROWS_AT_ONCE])
def test_one_expert_has_all_tokens(count: int) -> None:
    logits = torch.zeros(count, 9)
    logits[:, 5] = 1
    run = routed(logits, 1)
    run.sort()
    check_sorted(run)
    assert {expert for expert, _, _ in run.blocks} == {5}
    assert len(run.blocks) == -(-count // ROWS_AT_ONCE)
