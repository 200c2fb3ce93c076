"""The tests of the kernels of RMSNorm and of gated activations: they equal `reference`."""

from __future__ import annotations

import pytest
import torch
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu import activation, norm
from shmllm_kernels.reference import activation as plain_activation
from shmllm_kernels.reference import norm as plain_norm

EPS = 1e-5
NORM_SHAPES = [(0, 64), (1, 64), (3, 48), (5, 1000), (2, 1), (2, 2049)]
GATED_SHAPES = [(0, 64), (1, 64), (3, 48), (2, 1025), (2, 1)]


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the absolute and the relative tolerance: some last bits, and 1e-2 for bfloat16."""
    return {
        torch.float32: (1e-5, 1e-5),
        torch.float16: (1e-4, 2e-3),
        torch.bfloat16: (1e-2, 1e-2),
    }[dtype]


class RowKernelsConformance:
    @pytest.mark.parametrize("shape", NORM_SHAPES)
    def test_rms_norm(self, draw, dtype, shape):
        x, weight = draw.normal(*shape, dtype=dtype), draw.normal(shape[1], dtype=dtype)
        out = poisoned(*shape, dtype=dtype, device=draw.device)
        norm.rms_norm(out, x, weight, EPS)
        assert_close(out, plain_norm.rms_norm(x, weight, EPS), *tolerances(dtype))

    @pytest.mark.parametrize("shape", NORM_SHAPES)
    def test_add_rms_norm(self, draw, dtype, shape):
        x, residual = (draw.normal(*shape, dtype=dtype) for _ in range(2))
        weight = draw.normal(shape[1], dtype=dtype)
        out = poisoned(*shape, dtype=dtype, device=draw.device)
        total = residual.clone()
        norm.add_rms_norm(out, x, total, weight, EPS)
        want = plain_norm.add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(total, residual)
        assert_close(out, want, *tolerances(dtype))

    def test_eps_is_inside_the_root_and_dominates_zeros(self, draw, dtype):
        x = torch.zeros(2, 40, dtype=dtype, device=draw.device)
        x[1] = 1
        out = poisoned(2, 40, dtype=dtype, device=draw.device)
        norm.rms_norm(out, x, torch.ones_like(x[0]), 3.0)
        assert torch.equal(out, x / 2)

    def test_norms_of_strided_rows_and_in_place(self, draw, dtype):
        wide, weight = draw.normal(5, 100, dtype=dtype), draw.normal(33, dtype=dtype)
        rows = wide[:, 7:40]
        before, rest = plain_norm.rms_norm(rows, weight, EPS), wide[:, 40:].clone()
        norm.rms_norm(rows, rows, weight, EPS)
        assert_close(rows, before, *tolerances(dtype))
        assert torch.equal(wide[:, 40:], rest)

    @pytest.mark.parametrize("shape", GATED_SHAPES)
    def test_gated_activation(self, draw, dtype, shape):
        rows, dim = shape
        gate_up = draw.normal(rows, 2 * dim, dtype=dtype, scale=4.0)
        out = poisoned(rows, dim, dtype=dtype, device=draw.device)
        activation.silu_and_mul(out, gate_up)
        assert_close(out, plain_activation.silu_and_mul(gate_up), *tolerances(dtype))

    def test_activation_of_large_gates(self, draw, dtype):
        gates = torch.tensor([[-6e4, -200.0, -89.0, 0.0, 89.0, 6e4]], device=draw.device)
        gate_up = torch.cat((gates, torch.ones_like(gates)), 1).to(dtype)
        out = poisoned(1, 6, dtype=dtype, device=draw.device)
        activation.silu_and_mul(out, gate_up)
        assert_close(out, plain_activation.silu_and_mul(gate_up), *tolerances(dtype))

    def test_wrong_arguments_are_refused(self, draw, dtype):
        x, weight = draw.normal(4, 8, dtype=dtype), draw.normal(8, dtype=dtype)
        with pytest.raises(AssertionError, match="contiguous"):
            norm.rms_norm(x.new_empty(8, 4).t(), x, weight, EPS)
        with pytest.raises(AssertionError, match="weight"):
            norm.rms_norm(torch.empty_like(x), x, weight[:4], EPS)
        with pytest.raises(AssertionError, match="dtype"):
            norm.rms_norm(torch.empty_like(x), x, weight.double(), EPS)
        with pytest.raises(AssertionError, match="wide"):
            activation.silu_and_mul(torch.empty_like(x), x)
