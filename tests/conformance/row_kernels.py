"""The tests of the kernels of RMSNorm and of gated activations: they equal `reference`."""

from __future__ import annotations

import pytest
import torch
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu import activation, norm, per_layer
from shmllm_kernels.gpu.xielu import xielu
from shmllm_kernels.reference import activation as plain_activation
from shmllm_kernels.reference import norm as plain_norm
from shmllm_kernels.reference import per_layer as plain_per_layer

EPS = 1e-5
NORM_SHAPES = [(0, 64), (1, 64), (3, 48), (5, 1000), (2, 1), (2, 2049)]
NAMES = ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]
ACTIVATED_SHAPES = [(0, 64), (1, 64), (3, 48), (2, 1025), (2, 1)]


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

    @pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (0.25, 1.0)])
    def test_add_normed(self, draw, dtype, scale, offset):
        x, residual = (draw.normal(5, 72, dtype=dtype)[:, :70] for _ in range(2))
        weight = draw.normal(70, dtype=dtype)
        normed = plain_norm.rms_norm(x, weight, EPS, offset)
        want = (residual.float() + scale * normed.float()).to(dtype)
        norm.add_normed(x, residual, weight, EPS, scale, offset)
        assert_close(residual, want, *tolerances(dtype))

    @pytest.mark.parametrize("has_pair", [False, True])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_the_factor_of_a_sum_and_the_norm_of_two_norms(self, draw, dtype, has_pair, offset):
        x, other, residual = (draw.normal(5, 72, dtype=dtype)[:, :70] for _ in range(3))
        weights = [draw.normal(70, dtype=dtype) for _ in range(3)]
        factor = draw.normal(1, dtype=dtype)
        read, pair = x, None
        if has_pair:
            pair = norm.NormedPair(other, weights[1], weights[2])
            first = plain_norm.rms_norm(x, weights[2], EPS, offset)
            read = first + plain_norm.rms_norm(other, weights[1], EPS, offset)
        normed = plain_norm.rms_norm(read, weights[0], EPS, offset)
        want = (residual.float() + 0.5 * normed.float()).to(dtype) * factor
        norm.add_normed(x, residual, weights[0], EPS, 0.5, offset, factor, pair)
        assert_close(residual, want, *tolerances(dtype))

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

    def test_norms_with_an_offset_of_the_weight_and_a_factor(self, draw, dtype):
        x, residual = (draw.normal(5, 70, dtype=dtype) for _ in range(2))
        weight = draw.normal(70, dtype=dtype)
        out = poisoned(5, 70, dtype=dtype, device=draw.device)
        norm.rms_norm(out, x, weight, EPS, 1.0)
        assert_close(out, plain_norm.rms_norm(x, weight, EPS, 1.0), *tolerances(dtype))
        total = residual.clone()
        norm.add_rms_norm(out, x, total, weight, EPS, 0.5, 1.0)
        want = plain_norm.add_rms_norm(x, residual, weight, EPS, 0.5, 1.0)
        assert torch.equal(total, residual)
        assert_close(out, want, *tolerances(dtype))

    @pytest.mark.parametrize(("has_bias", "offset"), [(True, 1.0), (False, 0.0)])
    @pytest.mark.parametrize("shape", NORM_SHAPES[:4])
    def test_layer_norm(self, draw, dtype, shape, has_bias, offset):
        x, residual = (draw.normal(*shape, dtype=dtype) + 2 for _ in range(2))
        weight = draw.normal(shape[1], dtype=dtype)
        bias = draw.normal(shape[1], dtype=dtype) if has_bias else None
        out = poisoned(*shape, dtype=dtype, device=draw.device)
        norm.layer_norm(out, x, weight, bias, EPS, offset=offset)
        want = plain_norm.layer_norm(x, weight, bias, EPS, offset)
        assert_close(out, want, *tolerances(dtype))
        total = residual.clone()
        norm.layer_norm(out, x, weight, bias, EPS, total, 0.5, offset)
        want = plain_norm.add_layer_norm(x, residual, weight, bias, EPS, 0.5, offset)
        assert torch.equal(total, residual)
        assert_close(out, want, *tolerances(dtype))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("is_gated", [True, False])
    @pytest.mark.parametrize("shape", ACTIVATED_SHAPES)
    def test_activation(self, draw, dtype, shape, is_gated, name):
        rows, dim = shape
        x = draw.normal(rows, 2 * dim if is_gated else dim, dtype=dtype, scale=4.0)
        out = poisoned(rows, dim, dtype=dtype, device=draw.device)
        activation.activate(out, x, name, is_gated)
        assert_close(out, plain_activation.activate(x, name, is_gated), *tolerances(dtype))

    @pytest.mark.parametrize("name", ["silu", "silu_clamped", "silu_shifted"])
    @pytest.mark.parametrize("shape", ACTIVATED_SHAPES)
    def test_bounded_activation(self, draw, dtype, shape, name):
        rows, dim = shape
        x = draw.normal(rows, 2 * dim, dtype=dtype, scale=4.0)
        out = poisoned(rows, dim, dtype=dtype, device=draw.device)
        activation.activate(out, x, name, is_gated=True, bound=1.5)
        want = plain_activation.activate_bounded(x, name, 1.5)
        assert_close(out, want, *tolerances(dtype))

    @pytest.mark.parametrize("scale", [4.0, 1e-2])
    @pytest.mark.parametrize("shape", ACTIVATED_SHAPES)
    def test_xielu(self, draw, dtype, shape, scale):
        x = draw.normal(*shape, dtype=dtype, scale=scale)
        numbers = torch.tensor([0.4, -1.3, 0.5, -1e-6], device=draw.device)
        out = poisoned(*shape, dtype=dtype, device=draw.device)
        xielu(out, x, numbers)
        want = plain_activation.xielu(x, numbers)
        assert_close(out, want, *tolerances(dtype))

    @pytest.mark.parametrize("name", NAMES)
    def test_activation_of_large_gates(self, draw, dtype, name):
        gates = torch.tensor([[-6e4, -200.0, -89.0, 0.0, 89.0, 6e4]], device=draw.device)
        gate_up = torch.cat((gates, torch.ones_like(gates)), 1).to(dtype)
        out = poisoned(1, 6, dtype=dtype, device=draw.device)
        activation.activate(out, gate_up, name, is_gated=True)
        want = plain_activation.activate(gate_up, name, is_gated=True)
        assert_close(out, want, *tolerances(dtype))

    def test_wrong_arguments_are_refused(self, draw, dtype):
        x, weight = draw.normal(4, 8, dtype=dtype), draw.normal(8, dtype=dtype)
        with pytest.raises(AssertionError, match="contiguous"):
            norm.rms_norm(x.new_empty(8, 4).t(), x, weight, EPS)
        with pytest.raises(AssertionError, match="weight"):
            norm.rms_norm(torch.empty_like(x), x, weight[:4], EPS)
        with pytest.raises(AssertionError, match="dtype"):
            norm.rms_norm(torch.empty_like(x), x, weight.double(), EPS)
        with pytest.raises(AssertionError, match="wide"):
            activation.activate(torch.empty_like(x), x, "silu", is_gated=True)

    @pytest.mark.parametrize(("tokens", "layers", "width"), [(0, 2, 16), (1, 3, 24), (5, 2, 32)])
    def test_per_layer_inputs(self, draw, dtype, tokens, layers, width):
        x, table = (draw.normal(n, layers * width, dtype=dtype) for n in (tokens, 9))
        weight, sampled = draw.normal(width, dtype=dtype), draw.integers(0, 9, 4).long()
        ids = draw.integers(-5, 12, tokens).long()  # the table lacks three
        known = ids.where(ids >= -1, sampled[(-2 - ids).clamp(0)])
        numbers = 0.5, 0.3, 4.0, 7
        want = plain_per_layer.embed_per_layer(x.float(), table.float(), known, weight.float(),
                                               *numbers)  # fmt: skip
        per_layer.embed_per_layer(x, table, ids, sampled, weight, *numbers)
        assert_close(x, want.to(dtype), *tolerances(dtype))

    @pytest.mark.parametrize("name", NAMES)
    def test_gates_of_layer_inputs(self, draw, dtype, name):
        wide, x = draw.normal(3, 80, dtype=dtype), draw.normal(3, 24, dtype=dtype)
        want = wide.clone()
        gated = plain_per_layer.gate_layer_input(x.float(), wide[:, 24:48].float(), name)
        want[:, 24:48] = gated
        per_layer.gate_layer_input(wide[:, 24:48], x, name)
        assert_close(wide, want, *tolerances(dtype))
