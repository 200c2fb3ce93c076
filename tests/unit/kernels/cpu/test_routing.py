"""The choice of experts on a CPU: compared with torch, and defined for every logit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from shmllm_kernels.cpu.chosen_experts import LEAVE_OUT, TAKE_IDENTITIES
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.reference import moe
from shmllm_kernels.reference.moe import Choice
from tests.support.cpu_kernels import run_kernel
from tests.support.moe_helpers import MoERun

SHAPES = [(1, 1), (4, 1), (8, 2), (16, 16), (60, 4), (128, 8)]
"""Numbers of experts, and of experts for each token."""
ROUNDING = 2.0**-24
"""Of one operation in float32: an exponential, a sum, a quotient and a product make a weight."""


def routed(logits: Tensor, top_k: int, divides_by_all: bool = True) -> MoERun:
    run = MoERun(logits.shape[1], top_k, len(logits))
    run.route(logits, Choice(divides_by_all=divides_by_all))
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
        ids, weights = moe.route(logits.double(), top_k, Choice(divides_by_all=divides_by_all))
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


def chosen_by_sigmoids(logits: Tensor, bias: Tensor, choice: Choice, top_k: int) -> Tensor:
    """The weights of DeepSeek-V3's router (2024, section 2.1.2), [tokens, experts], as its authors
    write them: zeros but for the chosen experts."""
    scores = logits.double().sigmoid()
    groups = (scores + bias).unflatten(-1, (choice.num_groups, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(choice.top_groups, -1).indices
    kept = torch.zeros(groups.shape[:2]).scatter(1, best, 1.0)[..., None].bool()
    ids = groups.masked_fill(~kept, -math.inf).flatten(1).topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if not choice.divides_by_all:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores).scatter(1, ids, weights * choice.scale)


@pytest.mark.parametrize("divides_by_all", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "top_groups"),
    [(256, 8, 8, 4), (160, 6, 8, 3), (8, 2, 4, 1), (12, 3, 1, 1), (12, 12, 2, 2)],
)
def test_sigmoids_in_groups_equal_the_papers_formula(
    num_experts: int, top_k: int, num_groups: int, top_groups: int, divides_by_all: bool
) -> None:
    choice = Choice(
        divides_by_all=divides_by_all, is_sigmoid=True, num_groups=num_groups,
        top_groups=top_groups, num_best=2, scale=2.5,
    )  # fmt: skip
    logits, bias = torch.randn(60, num_experts) * 2, torch.randn(num_experts)
    run = MoERun(num_experts, top_k, len(logits))
    run.route(logits, choice, bias)
    found = torch.zeros(logits.shape).scatter(1, run.ids, run.weights)
    want = chosen_by_sigmoids(logits, bias, choice, top_k)
    torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("num_best", [1, 2])
def test_groups_agree_with_the_reference_on_ties_and_numbers_that_are_not_finite(
    is_sigmoid: bool, num_best: int
) -> None:
    palette = torch.tensor([0.0, 1.0, 1.0, -2.0, math.inf, -math.inf, math.nan])
    logits = palette[torch.randint(0, len(palette), (400, 12))]
    logits[0], logits[1] = math.nan, 5.0
    for divides_by_all, num_groups, top_groups in ((True, 3, 2), (False, 4, 2), (False, 6, 5)):
        choice = Choice(
            divides_by_all=divides_by_all, is_sigmoid=is_sigmoid, num_groups=num_groups,
            top_groups=top_groups, num_best=num_best, scale=16.0,
        )  # fmt: skip
        for top_k, bias in ((1, None), (4, None), (4, 0.5 ** torch.randperm(12))):
            run = MoERun(12, top_k, len(logits))
            run.route(logits, choice, bias)
            ids, weights = moe.route(
                logits.double(), top_k, choice, None if bias is None else bias.double()
            )
            assert torch.equal(run.ids, ids)
            torch.testing.assert_close(
                run.weights.double(), weights, atol=1e-7, rtol=4 * ROUNDING, equal_nan=True
            )


@pytest.mark.parametrize("divides_by_all", [False, True])
def test_a_bias_may_rank_experts_with_their_logits(divides_by_all: bool) -> None:
    """Kolibri 1's router, as transformers writes it."""
    logits, bias = torch.randn(80, 64) * 4, torch.randn(64) * 4
    run = MoERun(64, 6, len(logits))
    choice = Choice(
        divides_by_all=divides_by_all, is_sigmoid=True, ranks_logits=True, total_eps=0.0
    )
    run.route(logits, choice, bias)
    ids = (logits + bias).topk(6).indices.sort(-1).values
    weights = logits.double().gather(-1, ids).sigmoid()
    if not divides_by_all:
        weights /= weights.sum(-1, keepdim=True)
    assert torch.equal(run.ids, ids)
    assert not torch.equal(ids, (logits.sigmoid() + bias).topk(6).indices.sort(-1).values)
    torch.testing.assert_close(run.weights.double(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_a_bias_of_a_softmax_counts_for_the_choice_alone(scale: float) -> None:
    """ERNIE 4.5's router, as transformers writes it. With a scale of 40 some tokens' chosen experts
    have less than 1e-12 of the sum of all."""
    logits, bias = torch.randn(80, 64) * scale, torch.randn(64)
    run = MoERun(64, 6, len(logits))
    run.route(logits, Choice(divides_by_all=False), bias)
    scores = logits.double().softmax(-1)
    ids = (scores + bias).topk(6).indices.sort(-1).values
    chosen = scores.gather(-1, ids)
    total = chosen.sum(-1, keepdim=True)
    assert bool((total < 1e-12).any()) == (scale > 1)
    assert torch.equal(run.ids, ids)
    torch.testing.assert_close(
        run.weights.double(), chosen / total.clamp(min=1e-12), atol=1e-6, rtol=1e-5
    )


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


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_weights_of_sparse_mixer_are_transformers_weights(scale: float) -> None:
    logits = torch.randn(300, 16) * scale
    run = MoERun(16, 2, len(logits))
    run.route(logits, Choice(divides_by_all=False, mixer_limit=0.2))
    weights, ids = sparsemixer(logits.double(), jitter_eps=0.1, training=False)
    order = ids.argsort(-1)
    assert torch.equal(run.ids, ids.gather(-1, order))
    torch.testing.assert_close(
        run.weights.double(), weights.gather(-1, order), atol=1e-7, rtol=2e-6
    )


def test_sparse_mixer_agrees_with_the_reference_on_ties_and_nan() -> None:
    palette = torch.tensor([0.0, 1.0, 1.0, 0.95, -2.0, -1.9, math.nan])
    logits = palette[torch.randint(0, len(palette), (400, 12))]
    logits[:200] = palette[torch.randint(0, len(palette) - 1, (200, 12))]
    choice = Choice(divides_by_all=False, mixer_limit=0.1, scale=2.0)
    for top_k in (1, 2, 12):
        run = MoERun(12, top_k, len(logits))
        run.route(logits, choice)
        ids, weights = moe.route(logits.double(), top_k, choice)
        assert torch.equal(run.ids, ids)
        torch.testing.assert_close(run.weights.double(), weights, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize(
    ("tokens", "top_k", "width", "lowest", "choices"),
    [
        (50, 12, 100, 0, 30),
        (3, 4, 1025, 10, 8),
        (4, 3, 33, 0, 10),
        (1, 1, 1, 0, 20),
        (0, 2, 8, 0, 9),
    ],
    ids=["some", "all", "none", "one", "no tokens"],
)
def test_weights_of_choices_that_are_no_experts_multiply_what_experts_read(
    tokens: int, top_k: int, width: int, lowest: int, choices: int
) -> None:
    num_experts, weights = 10, torch.rand(tokens, top_k)
    order = torch.rand(tokens, choices).argsort(-1)
    ids = order[:, :top_k].sort(-1).values + lowest
    x = torch.randn(tokens, width + 3)
    wide = torch.full((tokens, width + 5), torch.nan)
    want, of_experts, kept = moe.take_identities(x[:, :width], ids, weights, num_experts)
    rows = [x, 4 * x.stride(0), wide, 4 * wide.stride(0)]
    run_kernel(TAKE_IDENTITIES, tokens, top_k, num_experts, ids, weights, *rows, width)
    torch.testing.assert_close(wide[:, :width], want)
    assert wide[:, width:].isnan().all()
    assert torch.equal(ids, of_experts)
    assert torch.equal(weights, kept)


@pytest.mark.parametrize("are_listed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_tokens_of_the_other_kind_have_no_experts(num_tokens: int, are_listed: bool) -> None:
    """A token with a given embedding, -1, counts as listed."""
    tokens, listed = torch.arange(num_tokens) % 9 - 1, torch.tensor([3, 7, 500])
    ids, weights = torch.randint(0, 10, (num_tokens, 6)), torch.rand(num_tokens, 6)
    want, _ = moe.leave_out(ids, weights, tokens, listed.tolist(), are_listed)
    run_kernel(LEAVE_OUT, num_tokens, 6, ids, tokens, listed, len(listed), int(are_listed))
    assert torch.equal(ids, want)
