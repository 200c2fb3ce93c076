"""The tests of the products of one token with its experts' weights."""

from __future__ import annotations

import pytest
import torch
from conformance.expert_kernels import ACTIVATIONS, BY_SOFTMAX, SMALL, placed, routed, tolerances
from conformance.packed_kernels import drawn, rows_of, values_of
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.pairs import sort_pairs
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.gpu.single_row import config_of, multiply_row


def multiply(out, x, weight, ids, bias=None, activation=None):
    made = None if activation is None else Activation(activation, activation != "relu_squared")
    multiply_row(out, x, weight, config_of(weight, x.device), bias, None, made, ids=ids)


class ExpertRowsConformance:
    @pytest.mark.parametrize(("activation", "has_bias"), ACTIVATIONS)
    @pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (7, 3)])
    def test_equal_those_of_sorted_pairs(self, draw, dtype, activation, has_bias, experts, top_k):
        hidden, inner = 70, 21
        width = inner if activation == "relu_squared" else 2 * inner
        x = draw.normal(1, hidden, dtype=dtype)
        first = draw.normal(experts, width, hidden, dtype=dtype, scale=hidden**-0.5)
        last = draw.normal(experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
        biases = [None, None]
        if has_bias:
            biases = [draw.normal(*each.shape[:2], dtype=dtype) for each in (first, last)]
        logits = draw.normal(1, experts, dtype=dtype, scale=2.0)
        ids, _ = routed(logits, top_k, BY_SOFTMAX)
        pairs = placed(1, top_k, experts, draw.device)
        sort_pairs(pairs, ids, experts, 16)
        # The sorted pairs of one token are in the order of its experts, as its choices are.
        got, want = poisoned(2, top_k, inner, dtype=dtype, device=draw.device)
        gate_and_up(want, x, first, biases[0], activation, top_k, pairs, SMALL)
        multiply(got, x, first, ids[0], biases[0], activation)
        assert_close(got, want, *tolerances(dtype))
        rows, wanted = poisoned(2, top_k, hidden, dtype=dtype, device=draw.device)
        down(wanted, want, last, biases[1], pairs, SMALL)
        multiply(rows, want, last, ids[0], biases[1])
        assert_close(rows, wanted, *tolerances(dtype))

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
