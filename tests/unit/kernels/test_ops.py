"""Compares the torch references with transformers' modules, and checks their inputs stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4_rotation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_rotation

from shmllm_kernels.reference.activation import activate
from shmllm_kernels.reference.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shmllm_kernels.reference.rope import apply_rope, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    module = LlamaRMSNorm(weight.shape[0], eps).to(x.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        result: Tensor = module(x)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 48), (300, 256), (5, 3, 16), (0, 8)])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 100.0])
def test_rms_norm_equals_transformers(
    shape: tuple[int, ...], dtype: torch.dtype, magnitude: float
) -> None:
    x = (random(*shape) * magnitude).to(dtype)
    weight = random(shape[-1], dtype=dtype, seed=1)
    ours, expected = rms_norm(x, weight, 1e-6), reference_norm(x, weight, 1e-6)
    assert ours.dtype == dtype
    # transformers rounds twice, so rare elements may differ in the last bit.
    tolerance = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=1e-7)
    if dtype != torch.float32 and ours.numel():
        assert (ours == expected).float().mean() > 0.99


def test_rms_norm_adds_eps_inside_the_root() -> None:
    weight = torch.ones(8)
    assert torch.equal(rms_norm(torch.zeros(2, 8), weight, 1e-5), torch.zeros(2, 8))
    torch.testing.assert_close(rms_norm(torch.ones(1, 8), weight, 3.0), torch.full((1, 8), 0.5))


def test_rms_norm_takes_strided_heads() -> None:
    heads, weight = random(4, 10, 16), random(16, seed=2)
    assert torch.equal(
        rms_norm(heads[:, 3:7], weight, 1e-6), rms_norm(heads[:, 3:7].contiguous(), weight, 1e-6)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_norm_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = random(65, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
    whole = rms_norm(x, weight, 1e-6)
    for row in (0, 1, 33, 64):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_add_then_norm(dtype: torch.dtype) -> None:
    x, residual = random(9, 32, dtype=dtype), random(9, 32, dtype=dtype, seed=1)
    weight = random(32, dtype=dtype, seed=2)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_of_the_weights_equals_transformers_gemma(dtype: torch.dtype) -> None:
    x, weight = random(9, 32, dtype=dtype), random(32, dtype=dtype, seed=2) * 0.1
    module = Gemma3RMSNorm(32, 1e-6).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module(x)
    ours = rms_norm(x, weight, 1e-6, offset=1.0)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected)


def test_a_factor_of_the_addition_applies_before_the_norm() -> None:
    x, residual, weight, bias = random(9, 32), random(9, 32, seed=1), random(32), random(32, seed=4)
    total = residual + 0.3 * x
    normed = add_rms_norm(x, residual.clone(), weight, 1e-6, scale=0.3, offset=1.0)
    torch.testing.assert_close(normed, rms_norm(total, weight + 1, 1e-6))
    normed = add_layer_norm(x, residual, weight, bias, 1e-6, scale=0.3, offset=1.0)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, F.layer_norm(total, (32,), weight + 1, bias, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_without_bias_equals_transformers_cohere2(dtype: torch.dtype) -> None:
    x, weight = random(9, 32, dtype=dtype), random(32, dtype=dtype, seed=2)
    module = Cohere2LayerNorm(32, 1e-6).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module(x)
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-6), expected)


def tables(tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin in transformers' layout, [tokens, dim]."""
    angles = random(tokens, dim // 2, seed=3) * 3
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def signed(sin: Tensor) -> Tensor:
    half = sin.shape[-1] // 2
    return torch.cat((-sin[:, :half], sin[:, half:]), -1).unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 130])
def test_apply_rope_equals_transformers(tokens: int, dtype: torch.dtype) -> None:
    query = random(tokens, 6, 16, dtype=dtype)
    key = random(tokens, 2, 16, dtype=dtype, seed=1)
    cos, sin = tables(tokens, 16, dtype)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    ours = apply_rope(query, key, cos.unsqueeze(1), signed(sin))
    tolerance = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rotary_dim", [6, 16])
def test_a_narrow_table_rotates_the_first_dimensions_as_in_phi3(rotary_dim: int) -> None:
    query, key = random(5, 6, 16), random(5, 2, 16, seed=1)
    cos, sin = tables(5, rotary_dim, torch.float32)
    expected = phi3_rotation(query, key, cos, sin)
    ours = apply_rope(query, key, cos.unsqueeze(1), signed(sin))
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [6, 16])
def test_interleaved_pairs_rotate_as_in_glm4(rotary_dim: int) -> None:
    query, key = random(5, 6, 16), random(5, 2, 16, seed=1)
    cos, sin = tables(5, rotary_dim, torch.float32)
    expected = glm4_rotation(query, key, cos, sin)
    ours = apply_rope(query, key, cos.unsqueeze(1), signed(sin), interleaved=True)
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_rotating_queries_and_keys_together_equals_rotating_each() -> None:
    heads = random(5, 12, 8)
    cos, sin = tables(5, 8, torch.float32)
    query, key = apply_rope(heads[:, :6], heads[:, 6:8], cos.unsqueeze(1), signed(sin))
    both = rotate(heads[:, :8], cos.unsqueeze(1), signed(sin))
    assert torch.equal(torch.cat((query, key), 1), both)


@pytest.mark.parametrize(
    ("name", "transformers_name"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu", "relu"),
        ("relu_squared", "relu2"),
    ],
)
def test_activations_equal_transformers(name: str, transformers_name: str) -> None:
    x, function = random(5, 48) * 4, ACT2FN[transformers_name]
    assert torch.equal(activate(x, name, is_gated=False), function(x))
    expected = function(x[:, :24]) * x[:, 24:]
    assert torch.equal(activate(x, name, is_gated=True), expected)


def test_operations_do_not_change_their_inputs() -> None:
    x, residual, weight = random(3, 4, 8), random(3, 4, 8, seed=1), random(8, seed=2)
    cos, sin = tables(3, 8, torch.float32)
    inputs = [x, residual, weight, cos, sin]
    before = [tensor.clone() for tensor in inputs]
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, residual.clone(), weight, 1e-6)
    apply_rope(x, residual, cos.unsqueeze(1), signed(sin))
    activate(x, "silu", is_gated=True)
    assert all(torch.equal(after, old) for after, old in zip(inputs, before, strict=True))
