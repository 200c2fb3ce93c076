"""The tests of the kernels of mixtures of experts: they equal `reference.moe`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conformance.attention_kernels import product_of_single_rows
from support.kernel_helpers import assert_close, poisoned
from support.variants import slow
from triton.runtime.interpreter import interpreter_builder

from shmllm_kernels.gpu.configs import ProductConfig
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import ALONE, down, gate_and_up
from shmllm_kernels.gpu.pair_layout import (
    LayoutScratch,
    PairLayout,
    lays_out,
    most_tokens,
    num_chunks,
)
from shmllm_kernels.gpu.pairs import SortedPairs, max_blocks, sort_pairs
from shmllm_kernels.gpu.routing import route
from shmllm_kernels.gpu.routing_by_token import route_by_token
from shmllm_kernels.reference import moe as plain

SMALL = ProductConfig(16, 32, 16, 4, 2)
WIDE = ProductConfig(32, 64, 32, 4, 2)
BY_SOFTMAX = plain.Choice(divides_by_all=True)
ACTIVATIONS = [
    *itertools.product(("silu", "gelu_tanh", "gpt_oss"), (True, False)),
    ("relu_squared", True),
    slow("gelu", True),
]
BOUNDED = (("silu_bounded", False), ("silu_clamped", False), ("silu_shifted", False))
ROUTED = [(1, 1, 1), (5, 4, 2), (3, 7, 7), (4, 60, 4), (2, 128, 8)]
"""Tokens, experts, and the number that each token goes to."""


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    return {
        torch.float32: (1e-5, 1e-5),
        torch.float16: (4e-3, 4e-3),
        torch.bfloat16: (3e-2, 2e-2),
    }[dtype]


def starts(num_tokens: int, device: torch.device) -> torch.Tensor:
    """The first tokens of one request with all tokens, and of a padded one."""
    return torch.tensor([0, num_tokens, num_tokens], dtype=torch.int32, device=device)


def routed(
    logits: torch.Tensor,
    top_k: int,
    choice: plain.Choice,
    num_tokens: int | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, device = len(logits), logits.device
    ids = torch.full((tokens, top_k), -7, dtype=torch.int32, device=device)
    weights = poisoned(tokens, top_k, dtype=torch.float32, device=device)
    existing = tokens if num_tokens is None else num_tokens
    route(ids, weights, logits, starts(existing, device), choice, bias)
    return ids, weights


def garbage(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.full(shape, -99, dtype=torch.int32, device=device)


def placed(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> SortedPairs:
    """Room for the sorted pairs of these tokens, in blocks of 16 or 32."""
    sizes = num_tokens * top_k, num_experts, 16, 32
    return SortedPairs.allocate(*sizes, lambda *shape: garbage(device, *shape))


def layout_of(
    tokens: int, top_k: int, experts: int, block_m: int, device: torch.device
) -> PairLayout:
    """Where `route` lays out the pairs of these tokens."""
    chunks = num_chunks(tokens, experts)
    done = torch.zeros(1, dtype=torch.int32, device=device)
    scratch = LayoutScratch(garbage(device, chunks, experts), garbage(device, tokens * top_k), done)
    return PairLayout(placed(tokens, top_k, experts, device), scratch, block_m)


def check_pairs(pairs: SortedPairs, ids: torch.Tensor, experts: int, block_m: int) -> None:
    """The pairs are those of ``ids`` by expert and token, and nothing else is written."""
    flat, blocks, first = ids.flatten().cpu(), [], 0
    want = torch.full((len(pairs.pairs) // block_m, block_m), -99)
    for expert in range(experts):
        mine = torch.nonzero(flat == expert).flatten()
        for some in mine.split(block_m) if len(mine) else ():
            want[len(blocks), : len(some)] = some
            blocks.append([expert, first, len(some)])
            first += len(some)
    assert pairs.num_blocks.tolist() == [len(blocks)]
    assert len(blocks) <= max_blocks(ids.numel(), experts, block_m)
    assert pairs.blocks[: len(blocks)].tolist() == blocks
    assert (pairs.blocks[len(blocks) :] == -99).all()
    assert torch.equal(pairs.pairs[: want.numel()].cpu().long(), want.flatten())


def run_programs_in_order(monkeypatch: pytest.MonkeyPatch, order: Callable[[int], int]) -> None:
    """Make the interpreter run program ``order(x)`` in place of program x."""
    set_index = type(interpreter_builder).set_grid_idx
    monkeypatch.setattr(
        interpreter_builder, "set_grid_idx",
        lambda x, y, z: set_index(interpreter_builder, order(x), y, z),
    )  # fmt: skip


class ExpertKernelsConformance:
    @pytest.mark.parametrize("divides_by_all", [True, False])
    @pytest.mark.parametrize(("tokens", "experts", "top_k"), ROUTED)
    def test_route(self, draw, dtype, tokens, experts, top_k, divides_by_all):
        wide = draw.normal(tokens, experts + 1, dtype=dtype, scale=2.0)
        choice = plain.Choice(divides_by_all=divides_by_all)
        ids, weights = routed(wide[:, :experts], top_k, choice)
        want_ids, want = plain.route(wide[:, :experts].float(), top_k, choice)
        assert torch.equal(ids.long(), want_ids)
        assert_close(weights, want, 1e-6, 1e-5)

    def test_of_equal_logits_the_lower_expert_is_chosen(self, draw, dtype):
        logits = draw.integers(0, 3, 9, 12).to(dtype)
        logits[0] = 1
        logits[1] = -torch.inf
        logits[2, 3:] = -torch.inf
        ids, _ = routed(logits, 5, BY_SOFTMAX)
        assert torch.equal(ids.long(), plain.route(logits.float(), 5, BY_SOFTMAX)[0])

    @pytest.mark.parametrize("divides_by_all", [True, False])
    @pytest.mark.parametrize("num_best", [1, 2])
    @pytest.mark.parametrize(
        ("is_sigmoid", "ranks_logits"), [(True, False), (False, False), (True, True)]
    )
    @pytest.mark.parametrize(
        ("experts", "top_k", "groups", "top_groups"), [(12, 4, 3, 2), (256, 8, 8, 4), (20, 6, 1, 1)]
    )
    def test_route_in_groups(
        self, draw, is_sigmoid, ranks_logits, num_best, divides_by_all, experts, top_k, groups,
        top_groups,
    ):  # fmt: skip
        choice = plain.Choice(
            divides_by_all=divides_by_all, is_sigmoid=is_sigmoid, ranks_logits=ranks_logits,
            num_groups=groups, top_groups=top_groups, num_best=num_best, scale=2.5,
        )  # fmt: skip
        logits = draw.normal(4, experts, dtype=torch.float32, scale=2.0)
        logits[1, 5], logits[2] = torch.nan, 1.0
        for bias in (None, draw.normal(experts, dtype=torch.float32)):
            ids, weights = routed(logits, top_k, choice, bias=bias)
            want_ids, want = plain.route(logits, top_k, choice, bias)
            assert torch.equal(ids.long(), want_ids)
            torch.testing.assert_close(weights, want, atol=1e-5, rtol=1e-5, equal_nan=True)

    @pytest.mark.parametrize(("experts", "top_k"), [(2, 2), (16, 2), (20, 5)])
    def test_route_as_sparse_mixer(self, draw, experts, top_k):
        choice = plain.Choice(divides_by_all=False, mixer_limit=0.3, scale=2.5)
        logits = draw.normal(6, experts, dtype=torch.float32, scale=0.5)
        logits[1, 1], logits[2], logits[3], logits[4] = torch.nan, 1.0, -2.0, 0.0
        ids, weights = routed(logits, top_k, choice)
        want_ids, want = plain.route(logits, top_k, choice)
        assert torch.equal(ids.long(), want_ids)
        torch.testing.assert_close(weights, want, atol=1e-5, rtol=1e-5, equal_nan=True)

    def test_a_number_is_added_to_the_sum_of_sigmoids(self, draw):
        logits = draw.normal(4, 12, dtype=torch.float32) - 12.0
        choice = plain.Choice(divides_by_all=False, is_sigmoid=True, total_eps=1e-6)
        without = plain.Choice(divides_by_all=False, is_sigmoid=True)
        _, weights = routed(logits, 3, choice)
        torch.testing.assert_close(weights, plain.route(logits, 3, choice)[1])
        assert not torch.allclose(weights, plain.route(logits, 3, without)[1])

    def test_scores_are_roots_of_softplus(self, draw):
        logits = draw.normal(5, 12, dtype=torch.float32, scale=8.0) - 4.0
        bias = draw.normal(12, dtype=torch.float32)
        choice = plain.Choice(
            divides_by_all=False, is_sigmoid=True, is_sqrt_softplus=True, scale=1.5
        )
        ids, weights = routed(logits, 3, choice, bias=bias)
        want_ids, want = plain.route(logits, 3, choice, bias)
        assert torch.equal(ids.long(), want_ids)
        torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("is_sqrt_softplus", [False, True])
    def test_ids_of_tokens_choose_experts(self, draw, dtype, is_sqrt_softplus):
        """Ids are known, sampled for a row, or stand for an embedding; the last token is padding.
        Numbers of no expert count as the nearest one."""
        given, known = [7, 0, -1, -2, -4, 29, -1], [7, 0, 0, 8, 9, 29, 0]
        last, tokens, ids_known = (
            torch.tensor(each, device=draw.device) for each in ([8, 5, 9], given, known)
        )
        table = draw.integers(0, 12, 30, 3).float()
        table[8] = torch.tensor([torch.nan, -5.0, 1e30])
        logits = draw.normal(len(given), 13, dtype=dtype)[:, :12]
        choice = plain.Choice(
            divides_by_all=False, is_sigmoid=True, is_sqrt_softplus=is_sqrt_softplus, scale=1.5
        )
        ids = torch.full((len(given), 3), -7, dtype=torch.int32, device=draw.device)
        weights = poisoned(len(given), 3, dtype=torch.float32, device=draw.device)
        ends = starts(len(given) - 1, draw.device)
        route_by_token(ids, weights, logits, ends, choice, tokens, last, table)
        want_ids, want = plain.route_by_token(logits.float(), ids_known, table, choice)
        assert torch.equal(ids[:-1].long(), want_ids[:-1])
        assert (ids[-1] == -1).all()
        torch.testing.assert_close(weights[:-1], want[:-1], atol=1e-6, rtol=1e-5)

    def test_a_sum_of_chosen_scores_of_a_softmax_is_not_too_small(self, draw):
        """The bias chooses experts with less than 1e-12 of the sum of all scores."""
        logits = draw.normal(4, 12, dtype=torch.float32)
        logits[1:, :3] += 40.0
        bias = torch.where(torch.arange(12, device=draw.device) < 4, 0.0, 2.0)
        choice = plain.Choice(divides_by_all=False)
        ids, weights = routed(logits, 4, choice, bias=bias)
        want_ids, want = plain.route(logits, 4, choice, bias)
        assert torch.equal(ids.long(), want_ids)
        assert (want[1:].sum(-1) < 0.5).all()
        torch.testing.assert_close(weights, want, atol=1e-7, rtol=1e-5)

    def test_a_nan_is_chosen_last_and_makes_all_weights_nan(self, draw, dtype):
        logits = draw.normal(3, 6, dtype=dtype)
        logits[0, 2] = torch.nan
        logits[1, :] = torch.nan
        choice = plain.Choice(divides_by_all=False)
        ids, weights = routed(logits, 3, choice)
        want_ids, want = plain.route(logits.float(), 3, choice)
        assert torch.equal(ids.long(), want_ids)
        assert_close(weights[2:], want[2:], 1e-6, 1e-5)
        assert weights[:2].isnan().all()

    def test_weights_of_chosen_experts_are_scaled(self, draw, dtype):
        logits, scales = draw.normal(5, 6, dtype=dtype), draw.normal(6, dtype=dtype)
        ids, plainly = routed(logits, 3, BY_SOFTMAX)
        weights = torch.empty_like(plainly)
        route(ids, weights, logits, starts(5, draw.device), BY_SOFTMAX, scales=scales)
        assert torch.equal(weights, plainly * scales.float()[ids.long()])

    def test_padded_tokens_go_to_no_expert(self, draw, dtype):
        logits = draw.normal(5, 8, dtype=dtype)
        logits[3:] = torch.nan
        ids, _ = routed(logits, 2, BY_SOFTMAX, num_tokens=3)
        assert (ids[3:] == -1).all()
        assert (ids[:3] >= 0).all()

    @pytest.mark.parametrize("block_m", [16, 32])
    @pytest.mark.parametrize(("tokens", "experts", "top_k"), [*ROUTED, (80, 3, 2), (2100, 5, 1)])
    def test_sorted_pairs(self, draw, tokens, experts, top_k, block_m):
        ids = torch.stack([draw.permutation(experts)[:top_k] for _ in range(tokens)]).int()
        ids[tokens // 2 + 1 :: 5] = -1
        pairs = placed(tokens, top_k, experts, draw.device)
        sort_pairs(pairs, ids.contiguous(), experts, block_m)
        check_pairs(pairs, ids, experts, block_m)

    @pytest.mark.parametrize("block_m", [16, 32])
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k"), [*ROUTED, (16, 8, 2), (40, 6, 5), (512, 9, 5), (9, 4096, 3)]
    )
    def test_route_lays_out_pairs(self, draw, dtype, tokens, experts, top_k, block_m):
        logits, existing = draw.normal(tokens, experts, dtype=dtype), tokens - tokens // 4
        logits[existing:] = torch.nan
        if tokens > 4:
            logits[:, 1] += 100.0  # one expert has many pairs
        layout = layout_of(tokens, top_k, experts, block_m, draw.device)
        want_ids, want = routed(logits, top_k, BY_SOFTMAX, existing)
        for _ in range(2):  # nothing is left of the first launch that the second one may not find
            ids, weights = torch.full_like(want_ids, -7), torch.full_like(want, torch.nan)
            layout.pairs.pairs.fill_(-99)
            route(ids, weights, logits, starts(existing, draw.device), BY_SOFTMAX, layout=layout)
            assert torch.equal(ids, want_ids)
            assert torch.equal(weights[:existing], want[:existing])
            if lays_out(tokens, experts):
                check_pairs(layout.pairs, ids, experts, block_m)
            else:
                assert (layout.pairs.blocks == -99).all()
            assert layout.scratch.num_done.item() == 0

    def test_the_layout_does_not_depend_on_which_program_is_the_last(
        self, draw, dtype, monkeypatch
    ):
        """Only the interpreter has programs in a certain order."""
        logits = draw.normal(61, 7, dtype=dtype)
        for order in (lambda x: x, lambda x: 3 - x, lambda x: (x + 2) % 4):
            run_programs_in_order(monkeypatch, order)
            layout = layout_of(61, 3, 7, 16, draw.device)
            ids, weights = torch.empty(2, 61, 3, device=draw.device)
            ids = ids.int()
            route(ids, weights, logits, starts(60, draw.device), BY_SOFTMAX, layout=layout)
            check_pairs(layout.pairs, ids, 7, 16)
            assert layout.scratch.num_done.item() == 0

    def test_a_routing_of_few_tokens_lays_out_pairs(self):
        """The last program has at most 8,192 counts, and decodes at most 512 tokens."""
        sizes = {8: 512, 128: 512, 256: 512, 512: 256, 4096: 4}
        assert {experts: most_tokens(experts) for experts in sizes} == sizes
        for experts, most in sizes.items():
            assert lays_out(most, experts)
            assert not lays_out(most + 1, experts)

    def test_no_tokens_have_no_blocks(self, draw, dtype):
        layout = layout_of(0, 2, 5, 16, draw.device)
        no_ids, weights = torch.empty(2, 0, 2, device=draw.device)
        ids, logits = no_ids.int(), draw.normal(0, 5, dtype=dtype)
        route(ids, weights, logits, starts(0, draw.device), BY_SOFTMAX, layout=layout)
        assert layout.pairs.num_blocks.item() == 0

    @pytest.mark.parametrize("num_pairs", range(1, 40))
    def test_the_most_blocks_are_reached(self, num_pairs):
        for experts in (1, 3, 8):
            chosen = min(experts, num_pairs)
            counts = [num_pairs - chosen + 1] + [1] * (chosen - 1)
            assert max_blocks(num_pairs, experts, 16) == sum(-(-count // 16) for count in counts)

    @pytest.mark.parametrize(("activation", "has_bias"), [*ACTIVATIONS, *BOUNDED])
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k", "hidden", "inner", "config"),
        [
            (0, 4, 2, 32, 16, SMALL),
            (1, 4, 2, 32, 16, SMALL),
            (6, 5, 3, 40, 24, SMALL),
            (40, 3, 1, 33, 50, SMALL),
            (21, 6, 2, 64, 48, WIDE),
        ],
    )
    def test_experts(
        self, draw, dtype, tokens, experts, top_k, hidden, inner, config, has_bias, activation
    ):
        logits, x = draw.normal(tokens, experts), draw.normal(tokens, hidden + 3, dtype=dtype)
        x = x[:, :hidden]
        ids, weights = routed(logits, top_k, plain.Choice(divides_by_all=True))
        width = inner if activation in ALONE else 2 * inner
        gate_up = draw.normal(experts, width, hidden, dtype=dtype, scale=hidden**-0.5)
        last = draw.normal(experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
        gate_up_bias = draw.normal(experts, width, dtype=dtype) if has_bias else None
        last_bias = draw.normal(experts, hidden, dtype=dtype) if has_bias else None
        pairs = placed(tokens, top_k, experts, draw.device)
        sort_pairs(pairs, ids, experts, config.block_m)
        activated = poisoned(tokens * top_k, inner, dtype=dtype, device=draw.device)
        first = gate_up, gate_up_bias, activation, top_k, pairs, config
        gate_and_up(activated, x, *first, bound=0.5)
        rows = poisoned(tokens * top_k, hidden, dtype=dtype, device=draw.device)
        down(rows, activated, last, last_bias, top_k, pairs, config)
        out = poisoned(tokens, hidden, dtype=dtype, device=draw.device)
        combine(WeightedSum(out, weights), rows)
        biases = [None if bias is None else bias.double() for bias in (gate_up_bias, last_bias)]
        want = plain.experts(
            x.double(), ids.long(), weights.double(), gate_up.double(), last.double(), *biases,
            activation, bound=0.5,
        )  # fmt: skip
        assert_close(out, want.to(dtype), *tolerances(dtype))

    def test_weights_multiply_what_experts_read(self, draw, dtype):
        tokens, top_k, experts, hidden, inner = 40, 2, 4, 48, 24
        x = draw.normal(tokens, hidden, dtype=dtype)
        gate_up = draw.normal(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
        last = draw.normal(experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
        ids, weights = routed(draw.normal(tokens, experts, dtype=dtype), top_k, BY_SOFTMAX)
        pairs = placed(tokens, top_k, experts, draw.device)
        sort_pairs(pairs, ids, experts, SMALL.block_m)
        activated = poisoned(tokens * top_k, inner, dtype=dtype, device=draw.device)
        operands = activated, x, gate_up, None, "silu", top_k, pairs, SMALL
        gate_and_up(*operands, gate_factors=weights)
        rows = poisoned(tokens * top_k, hidden, dtype=dtype, device=draw.device)
        down(rows, activated, last, None, top_k, pairs, SMALL)
        out = poisoned(tokens, hidden, dtype=dtype, device=draw.device)
        combine(WeightedSum(out, weights), rows)
        operands = x.double(), ids.long(), weights.double(), gate_up.double(), last.double()
        want = plain.experts(*operands, weighs_inputs=True)
        assert_close(out, want.to(dtype), *tolerances(dtype))
        assert (want - plain.experts(*operands)).abs().max() > 0.02

    @pytest.mark.parametrize("dim", [1, 40, 1025])
    @pytest.mark.parametrize("shared", ["none", "plain", "gated"])
    def test_combine(self, draw, dtype, dim, shared):
        rows, weights = draw.normal(3, 4, dim, dtype=dtype), draw.normal(3, 4)
        extra = draw.normal(3, dim + 2, dtype=dtype)[:, :dim] if shared != "none" else None
        gates = draw.normal(3, 5, dtype=dtype)[:, 4] if shared == "gated" else None
        out = poisoned(3, dim, dtype=dtype, device=draw.device)
        combine(WeightedSum(out, weights, extra, gates), rows.flatten(0, 1))
        want = (rows.double() * weights.double()[..., None]).sum(1)
        if extra is not None:
            factor = 1.0 if gates is None else gates.double().sigmoid()[:, None]
            want = want + factor * extra.double()
        assert_close(out, want.to(dtype), *tolerances(dtype))
        before = draw.normal(3, dim, dtype=dtype)
        for scale in (1.0, 0.25):  # their products are exact, whether they are rounded or not
            residual = before.clone()
            total = WeightedSum(residual, weights, extra, gates, True, scale)
            combine(total, rows.flatten(0, 1))
            assert torch.equal(residual, before.add(out, alpha=scale))

    def test_a_pairs_bits_do_not_depend_on_the_batch(self, draw, dtype, monkeypatch):
        monkeypatch.setattr(np, "matmul", product_of_single_rows)
        experts, hidden, inner = 4, 48, 24
        x = draw.normal(20, hidden, dtype=dtype)
        weight = draw.normal(experts, 2 * inner, hidden, dtype=dtype)
        ids = draw.integers(0, experts, 20, 1, dtype=torch.int32)

        def run(tokens: torch.Tensor) -> torch.Tensor:
            pairs = placed(len(tokens), 1, experts, draw.device)
            sort_pairs(pairs, ids[tokens].contiguous(), experts, SMALL.block_m)
            out = poisoned(len(tokens), inner, dtype=dtype, device=draw.device)
            gate_and_up(out, x[tokens], weight, None, "silu", 1, pairs, SMALL)
            by_pair = torch.empty_like(out)
            by_pair[ids[tokens, 0].sort(stable=True).indices] = out
            return by_pair

        some = torch.tensor([3, 7, 8, 19], device=draw.device)
        assert torch.equal(run(torch.arange(20, device=draw.device))[some], run(some))

    def test_wrong_arguments_are_refused(self, draw, dtype):
        logits = draw.normal(2, 3, dtype=dtype)
        with pytest.raises(AssertionError, match="4 of 3 experts"):
            routed(logits, 4, True)
        pairs = placed(2, 1, 3, draw.device)
        with pytest.raises(AssertionError, match="int32"):
            sort_pairs(pairs, torch.zeros(2, 1, dtype=torch.int64, device=draw.device), 3, 16)
        zeros = torch.zeros(49, 1, dtype=torch.int32, device=draw.device)
        with pytest.raises(AssertionError, match="too few places"):
            sort_pairs(pairs, zeros[:2], 3, 64)
        with pytest.raises(AssertionError, match="too few blocks"):
            sort_pairs(pairs, zeros, 3, 16)
        x, weight = draw.normal(2, 8, dtype=dtype), draw.normal(3, 12, 8, dtype=dtype)
        out = torch.empty(2, 6, dtype=dtype, device=draw.device)
        with pytest.raises(AssertionError, match="no activation"):
            gate_and_up(out, x, weight, None, "relu", 1, pairs, SMALL)
        with pytest.raises(AssertionError, match="bias"):
            gate_and_up(out, x, weight, weight[:, :4, 0], "silu", 1, pairs, SMALL)
        with pytest.raises(AssertionError, match="dtype"):
            down(out, x, weight[:, :6].double(), None, 1, pairs, SMALL)
