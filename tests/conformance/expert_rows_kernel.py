"""The tests of the products of one token with its experts' weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.expert_kernels import ACTIVATIONS, BY_SOFTMAX, SMALL, placed, routed, tolerances
from conformance.packed_kernels import drawn, rows_of, values_of
from support.kernel_helpers import assert_close, poisoned
from support.variants import each_once

from shmllm_kernels.gpu.combined_row import combine_products
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import gate_and_up
from shmllm_kernels.gpu.pairs import sort_pairs
from shmllm_kernels.gpu.row_configs import SingleRowConfig
from shmllm_kernels.gpu.row_operands import Activation, RowNorm
from shmllm_kernels.gpu.single_row import config_of, multiply_row
from shmllm_kernels.reference import moe as plain
from shmllm_kernels.reference.norm import rms_norm

TILES = [SingleRowConfig(4, 64, 2), SingleRowConfig(2, 128, 1)]
"""Tiles of products of one row; a row of 192 elements is three of the first, and not whole ones of
the second."""


def multiply(out, x, weight, ids, bias=None, activation=None, norm=None):
    made = None if activation is None else Activation(activation, activation != "relu_squared")
    multiply_row(out, x, weight, config_of(weight, x.device), bias, norm, made, ids=ids)


class ExpertRowsConformance:
    @pytest.mark.parametrize(("activation", "has_bias"), ACTIVATIONS)
    @pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (7, 3)])
    def test_equal_those_of_sorted_pairs(self, draw, dtype, activation, has_bias, experts, top_k):
        hidden, inner = 70, 21
        width = inner if activation == "relu_squared" else 2 * inner
        x = draw.normal(1, hidden, dtype=dtype)
        first = draw.normal(experts, width, hidden, dtype=dtype, scale=hidden**-0.5)
        bias = draw.normal(experts, width, dtype=dtype) if has_bias else None
        logits = draw.normal(1, experts, dtype=dtype, scale=2.0)
        ids, _ = routed(logits, top_k, BY_SOFTMAX)
        pairs = placed(1, top_k, experts, draw.device)
        sort_pairs(pairs, ids, experts, 16)
        # The sorted pairs of one token are in the order of its experts, as its choices are.
        got, want = poisoned(2, top_k, inner, dtype=dtype, device=draw.device)
        gate_and_up(want, x, first, bias, activation, top_k, pairs, SMALL)
        multiply(got, x, first, ids[0], bias, activation)
        assert_close(got, want, *tolerances(dtype))

    @pytest.mark.parametrize("kind", [None, "int4"])
    def test_the_norm_of_the_row(self, draw, dtype, kind):
        x, own = draw.normal(1, 192, dtype=dtype, scale=3.0), draw.normal(192, dtype=dtype)
        packed = None if kind is None else drawn(draw, kind, 5, 40, 192, dtype=dtype)
        weight = draw.normal(5, 40, 192, dtype=dtype, scale=0.1)
        if packed is not None:
            weight = rows_of(packed)
        ids = torch.tensor([1, 4], dtype=torch.int32, device=draw.device)
        got, want = poisoned(2, 2, 20, dtype=dtype, device=draw.device)
        multiply(got, x, weight, ids, None, "silu", RowNorm(own, 1e-5, 1.0))
        multiply(want, rms_norm(x, own, 1e-5, 1.0), weight, ids, None, "silu")
        assert_close(got, want, *tolerances(dtype))

    @pytest.mark.parametrize("kind", ["mxfp4", "int4", "q6_k", "fp8"])
    @pytest.mark.parametrize("activation", ["gpt_oss", "silu", "relu_squared"])
    def test_packed_weights(self, draw, dtype, kind, activation):
        hidden, inner = 256, 20
        width = inner if activation == "relu_squared" else 2 * inner
        x = draw.normal(1, hidden, dtype=dtype)
        matrix = drawn(draw, kind, 5, width, hidden, dtype=dtype)
        ids = torch.tensor([1, 4], dtype=torch.int32, device=draw.device)
        got, want = poisoned(2, 2, inner, dtype=dtype, device=draw.device)
        multiply(got, x, rows_of(matrix), ids, None, activation)
        multiply(want, x, values_of(matrix), ids, None, activation)
        assert_close(got, want, *tolerances(dtype))

    def test_an_expert_that_does_not_exist_reads_no_other_memory(self, draw, dtype):
        weight, x = draw.normal(3, 4, 16, dtype=dtype), draw.normal(1, 16, dtype=dtype)
        ids = torch.tensor([-7, 2**30], dtype=torch.int32, device=draw.device)
        out = poisoned(2, 4, dtype=dtype, device=draw.device)
        multiply(out, x, weight, ids)
        assert_close(out[0], (x @ weight[0].t())[0], *tolerances(dtype))
        assert torch.equal(out[0], out[1])

    @pytest.mark.parametrize("has_bias", [True, False])
    @pytest.mark.parametrize("activation", ["silu", "relu_squared"])
    @pytest.mark.parametrize(("experts", "top_k", "inner"), [(1, 1, 5), (7, 3, 150)])
    def test_one_launch_sums_the_products_of_all_experts(
        self, draw, dtype, experts, top_k, inner, activation, has_bias
    ):
        hidden, width = 70, inner if activation == "relu_squared" else 2 * inner
        x = draw.normal(1, hidden, dtype=dtype)
        first = draw.normal(experts, width, hidden, dtype=dtype, scale=hidden**-0.5)
        last = draw.normal(experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
        bias = draw.normal(experts, hidden, dtype=dtype) if has_bias else None
        logits = draw.normal(1, experts, dtype=dtype, scale=2.0)
        ids, weights = routed(logits, top_k, BY_SOFTMAX)
        activated = poisoned(top_k, inner, dtype=dtype, device=draw.device)
        multiply(activated, x, first, ids[0], None, activation)
        out = poisoned(1, hidden, dtype=dtype, device=draw.device)
        total = WeightedSum(out, weights)
        combine_products(total, activated, last, TILES[0], ids[0], bias)
        of_down = None if bias is None else bias.double()
        want = plain.experts(
            x.double(), ids.long(), weights.double(), first.double(), last.double(), None, of_down,
            activation,
        )  # fmt: skip
        assert_close(out, want.to(dtype), *tolerances(dtype))

    @pytest.mark.parametrize(
        ("kind", "shared", "config"),
        each_once([None, "mxfp4", "int4", "q6_k", "fp8"], ["none", "plain", "gated"], TILES),
    )
    def test_one_launch_rounds_as_launches_of_their_own(self, draw, dtype, kind, shared, config):
        """Also the sum with the residual stream. A GPU may round a sum of products once."""
        n, k, top_k = 40, 512 if kind == "q6_k" else 192, 3
        packed = None if kind is None else drawn(draw, kind, 5, n, k, dtype=dtype)
        weight = draw.normal(5, n, k, dtype=dtype) if packed is None else rows_of(packed)
        x, bias = draw.normal(top_k, k, dtype=dtype), draw.normal(5, n, dtype=dtype)
        ids = torch.tensor([1, 2, 4], dtype=torch.int32, device=draw.device)
        extra = draw.normal(1, n, dtype=dtype) if shared != "none" else None
        gates = draw.normal(1, dtype=dtype) if shared == "gated" else None
        rows = poisoned(1, top_k, n, dtype=dtype, device=draw.device)
        for choice in range(top_k):
            own = slice(choice, choice + 1)
            multiply_row(rows[0, own], x[own], weight, config, bias, ids=ids[own])
        before = draw.normal(1, n, dtype=dtype)
        weights = draw.normal(1, top_k)
        for adds in (True, False):
            total = WeightedSum(before.clone(), weights, extra, gates, adds, 0.3)
            apart = replace(total, out=before.clone())
            combine_products(total, x, weight, config, ids, bias)
            combine(apart, rows[0])
            assert_close(total.out, apart.out, *tolerances(dtype))
            assert draw.device.type != "cpu" or torch.equal(total.out, apart.out)

    def test_the_sum_of_experts_that_do_not_exist_reads_no_other_memory(self, draw, dtype):
        weight, x = draw.normal(3, 4, 16, dtype=dtype), draw.normal(2, 16, dtype=dtype)
        weights, out = draw.normal(1, 2), poisoned(2, 1, 4, dtype=dtype, device=draw.device)
        for each, chosen in zip(out, ([-7, 2**30], [0, 0]), strict=True):
            ids = torch.tensor(chosen, dtype=torch.int32, device=draw.device)
            combine_products(WeightedSum(each, weights), x, weight, TILES[0], ids)
        assert torch.equal(*out)
