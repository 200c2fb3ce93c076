"""Weights of 8 bits: what they mean, and that a model computes with just that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import assert_logits_close, load, our_logits, reference_model, save

from shmllm.models.quantized import LARGEST, Int8Weight

TOKENS = [int(token) for token in torch.randint(0, 97, (40,), generator=torch.manual_seed(3))]


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(5)
    return (torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]).to(dtype)


def rounded(weight: torch.Tensor) -> Int8Weight:
    matrix = Int8Weight(weight, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    matrix.derive()
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_channel_is_rounded_by_half_a_step_of_its_own_scale(dtype: torch.dtype) -> None:
    weight = weight_of((33, 64), dtype)
    matrix = rounded(weight)
    error = (matrix.integers * matrix.scales[:, None] - weight.float()).abs()
    assert (error <= matrix.scales[:, None] * 0.5001).all()
    assert (matrix.integers.abs().amax(1) == LARGEST).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = weight_of((33, 64))
    weight[4] = 0
    matrix = rounded(weight)
    assert not matrix.integers[4].any()
    assert torch.isfinite(matrix.scales).all()


def test_new_weights_are_rounded_into_the_same_memory() -> None:
    weight = weight_of((64, 48))
    matrix = rounded(weight)
    address, before = matrix.integers.data_ptr(), matrix.integers.clone()
    weight.neg_()
    matrix.derive()
    assert torch.equal(matrix.integers, -before)
    assert matrix.integers.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_computes_with_what_was_rounded(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Against the same model, in float32, whose matrices were rounded beforehand."""
    reference = reference_model(family, 4.0)
    directory = save(reference, tmp_path)
    model, plain = load(directory, dtype), load(directory)
    for linear, other in zip(model.linears(), plain.linears(), strict=True):
        matrix = rounded(linear.weight)
        other.weight.copy_(matrix.integers * matrix.scales[:, None])
    for name, views in model.named_weights().items():
        if "norm" in name or "bias" in name or "embed" in name:
            plain.named_weights()[name][0].copy_(views[0])
    model.quantize(lambda shape, kind: torch.empty(shape, dtype=kind))
    bound = 2e-5 if dtype is torch.float32 else 0.02  # keys and values are rounded
    assert_logits_close(our_logits(model, TOKENS), our_logits(plain, TOKENS), bound)
