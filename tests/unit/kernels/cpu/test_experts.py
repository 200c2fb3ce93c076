"""CPU mixtures of experts: compared with float64, and equal to a loop over experts, bit by bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.cpu_kernels import NEEDS_BFLOAT16, run_kernel
from support.variants import slow
from torch import Tensor

from shmllm_kernels.cpu.product_tiles import TILE_COLUMNS
from shmllm_kernels.cpu.products import DTYPES, MULTIPLY, ROWS_AT_ONCE
from shmllm_kernels.cpu.rows import ACTIVATE
from shmllm_kernels.reference import moe
from tests.support.moe_helpers import Experts, MoERun
from tests.unit.kernels.cpu.test_products import multiply

KINDS = [
    *(("float32", kind) for kind in DTYPES),
    pytest.param(("bfloat16", "bfloat16"), marks=NEEDS_BFLOAT16),
]
"""The dtype names of activations and weights."""


def random_experts(kinds: tuple[str, str], *sizes: int, **options: Any) -> Experts:
    """Random experts for activations of another dtype."""
    x_dtype, dtype = (getattr(torch, kind) for kind in kinds)
    return replace(Experts.random(*sizes, dtype=dtype, **options), x_dtype=x_dtype)


def random_routing(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k].sort(-1).values
    return ids, torch.rand(num_tokens, top_k)


def compute(
    x: Tensor,
    experts: Experts,
    ids: Tensor,
    weights: Tensor,
    num_threads: int = 2,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    run = MoERun(len(experts.down), ids.shape[1], len(x), num_threads)
    run.route_to(ids, weights)
    return run.experts(x, experts, shared, gates)


def expected(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    values = [experts.values(name) for name in names]
    options = experts.activation, experts.weighs_inputs, experts.bound
    return moe.experts(x.double(), ids, weights.double(), *values, *options)


def magnitudes(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of the magnitudes of each result's terms, [tokens, hidden]."""
    gate_up, down, bias = (experts.values(name) for name in ("gate_up", "down", "gate_up_bias"))
    assert gate_up is not None
    assert down is not None
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in np.ndindex(*ids.shape):
        expert, weight = ids[token, choice], weights[token, choice].double()
        read = x[token].double() * (weight if experts.weighs_inputs else 1)
        own_bias = None if bias is None else bias[expert]
        row = moe.activated(read, gate_up[expert], own_bias, experts.activation, experts.bound)
        found[token] += (1 if experts.weighs_inputs else weight) * down[expert].abs() @ row.abs()
    return found


def assert_near(found: Tensor, x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """Checks results against float64, and returns the errors that it allows.

    A value that is rounded to bfloat16 before the last product moves its term by 2**-8 at most.
    Terms may cancel out, so the bound is one of their magnitudes, not of the result.
    """
    sums = magnitudes(x, experts, ids, weights)
    allowed = 1e-5 * (1 + sums)
    if experts.x_dtype == torch.bfloat16:
        allowed += 2**-8 * sums
    assert ((found - expected(x, experts, ids, weights)).abs() <= allowed).all()
    return allowed


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gpt_oss", "relu_squared", slow("gelu")])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(3, 1), (TILE_COLUMNS, TILE_COLUMNS), (70, 37)])
def test_experts_equal_the_reference(
    kinds: tuple[str, str], activation: str, has_bias: bool, hidden: int, inner: int
) -> None:
    experts = random_experts(kinds, 6, hidden, inner, activation=activation, has_bias=has_bias)
    for num_tokens in (0, 1, 2, 25):
        x = (torch.randn(num_tokens, hidden) * 4).to(experts.x_dtype)
        ids, weights = random_routing(num_tokens, 6, 3)
        assert_near(compute(x, experts, ids, weights), x, experts, ids, weights)


@pytest.mark.parametrize("activation", ["silu_bounded", "silu_clamped", slow("silu_shifted")])
@pytest.mark.parametrize("kinds", KINDS)
def test_gates_and_ups_are_bounded(kinds: tuple[str, str], activation: str) -> None:
    made = random_experts(kinds, 6, 70, 37, activation=activation)
    x = (torch.randn(25, 70) * 4).to(made.x_dtype)
    ids, weights = random_routing(25, 6, 3)
    bounded, free = (replace(made, bound=bound) for bound in (0.5, 1e9))
    found = compute(x, bounded, ids, weights)
    allowed = assert_near(found, x, bounded, ids, weights)
    plain = compute(x, replace(made, activation="silu"), ids, weights)
    if activation != "silu_shifted":
        assert torch.equal(compute(x, free, ids, weights), plain)
    assert ((found - plain).abs() > 10 * allowed).any()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_weights_multiply_what_experts_read(kinds: tuple[str, str], activation: str) -> None:
    made = random_experts(kinds, 6, 70, 37, activation=activation)
    experts = replace(made, weighs_inputs=True)
    x = (torch.randn(25, 70) * 4).to(experts.x_dtype)
    ids, weights = random_routing(25, 6, 3)
    found = compute(x, experts, ids, weights)
    allowed = assert_near(found, x, experts, ids, weights)
    assert ((found - compute(x, made, ids, weights)).abs() > 10 * allowed).any()


@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_integers_are_scaled_by_expert_and_column(activation: str) -> None:
    def integers(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8)

    experts = Experts(
        integers(5, 40, 33), integers(5, 33, 20),
        torch.randn(5, 40).bfloat16(), torch.randn(5, 33).bfloat16(),
        torch.rand(5, 40) / 300, torch.rand(5, 33) / 300, activation, torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(17, 33)
    ids, weights = random_routing(17, 5, 2)
    found = compute(x, experts, ids, weights)
    torch.testing.assert_close(
        found.double(), expected(x, experts, ids, weights), atol=1e-5, rtol=1e-5
    )


def test_one_row_is_added_to_all_sums() -> None:
    experts = Experts.random(5, 32, 24, activation="gelu", has_bias=True)
    x, row = torch.randn(9, 32), torch.randn(32)
    ids, weights = random_routing(9, 5, 2)
    found = compute(x, experts, ids, weights, shared=row.expand(9, -1))
    assert torch.equal(found, compute(x, experts, ids, weights) + row)


def loop_over_experts(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """Computes each expert by the kernels of a dense MLP, and adds in ascending order."""
    kernel, inner = MULTIPLY[experts.kinds], experts.down.shape[2]
    out, x = torch.zeros_like(x), x.to(experts.x_dtype)
    for expert in range(len(experts.down)):
        tokens, choices = torch.nonzero(ids == expert, as_tuple=True)
        gate_up = multiply(kernel, x[tokens], experts.gate_up[expert])
        activated = torch.empty(len(tokens), inner)
        run_kernel(ACTIVATE["silu", True], len(tokens), gate_up, activated, inner)
        rows = multiply(kernel, activated.to(experts.x_dtype), experts.down[expert])
        out[tokens] += weights[tokens, choices, None] * rows
    return out


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 1), (8, 2), (4, 4)])
def test_groups_have_the_bits_of_a_loop_over_experts(
    kinds: tuple[str, str], num_experts: int, top_k: int
) -> None:
    """Includes experts without tokens, and depths that are summed in parts."""
    for hidden, inner in ((48, 100), (1100, 20)):
        experts = random_experts(kinds, num_experts, hidden, inner)
        for num_tokens in (1, 3, 40):
            x = torch.randn(num_tokens, hidden)
            ids, weights = random_routing(num_tokens, num_experts, top_k)
            found = compute(x, experts, ids, weights)
            assert torch.equal(found, loop_over_experts(x, experts, ids, weights))


def test_one_expert_with_all_tokens_has_the_bits_of_the_loop() -> None:
    experts = Experts.random(3, 32, 24)
    x = torch.randn(2 * ROWS_AT_ONCE + 5, 32)
    ids, weights = torch.full((len(x), 1), 1), torch.rand(len(x), 1)
    found = compute(x, experts, ids, weights)
    assert torch.equal(found, loop_over_experts(x, experts, ids, weights))


@pytest.mark.parametrize("activation", ["silu", "gpt_oss", "relu_squared", slow("gelu")])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(activation: str) -> None:
    experts = Experts.random(7, 61, 45, torch.bfloat16, activation, has_bias=True)
    x = torch.randn(ROWS_AT_ONCE + 30, 61)
    ids, weights = random_routing(len(x), 7, 3)
    whole = compute(x, experts, ids, weights)
    for num_threads in (1, 2, 3):
        for size in (1, 2, 7, 60):
            for begin in range(0, len(x), 5 * size):
                rows = slice(begin, begin + size)
                part = compute(x[rows].clone(), experts, ids[rows], weights[rows], num_threads)
                assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_shared_expert_is_added_after_the_others(has_gate: bool) -> None:
    experts = Experts.random(4, 30, 16)
    x, shared, gates = torch.randn(9, 30), torch.randn(9, 30), torch.randn(9) * 30
    ids, weights = random_routing(9, 4, 2)
    routed = compute(x, experts, ids, weights)
    found = compute(x, experts, ids, weights, shared=shared, gates=gates if has_gate else None)
    factor = gates.sigmoid()[:, None] if has_gate else 1.0
    torch.testing.assert_close(found, routed + factor * shared, atol=1e-6, rtol=1e-6)
    if not has_gate:
        assert torch.equal(found, routed + shared)


def test_nan_in_one_token_does_not_change_the_others() -> None:
    experts, logits = Experts.random(6, 40, 32), torch.randn(12, 6)
    x = torch.randn(12, 40)
    results = []
    for bad in (False, True):
        if bad:
            x[3], logits[3] = math.nan, math.nan
        run = MoERun(6, 2, 12)
        run.route(logits)
        results.append(run.experts(x, experts))
    clean, found = results
    assert found[3].isnan().all()
    keep = [token for token in range(12) if token != 3]
    assert torch.equal(found[keep], clean[keep])


def test_pairs_that_are_left_out_are_not_computed() -> None:
    """Some tokens have no experts: their sum is 0, and those of the others stay."""
    experts, x = Experts.random(5, 32, 24), torch.randn(7, 32)
    run, ids, weights = MoERun(5, 2, 7), torch.randint(0, 5, (7, 2)), torch.rand(7, 2)
    run.route_to(ids, weights)
    want = run.experts(x, experts)
    is_out = torch.tensor([True, False, True, False, False, True, False])
    few = MoERun(5, 2, 7)
    few.route_to(ids.masked_fill(is_out[:, None], -1), weights)
    found = few.experts(x, experts)
    assert torch.equal(found[~is_out], want[~is_out])
    assert not found[is_out].any()
    assert sum(count for _, _, count in few.blocks) == 2 * int((~is_out).sum())
