"""Weights of 8 bits: what they mean, and that all ways of multiplying mean the same."""

from __future__ import annotations

import pytest
import torch

from shmllm.models.quantized import INTEGER_ROWS, Int8Product, quantize


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(5)
    return (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).to(dtype)


def test_each_channel_is_rounded_by_half_a_step_of_its_own_scale() -> None:
    weight = weight_of((64, 33)).t()
    integers, scales = quantize(weight)
    assert integers.dtype is torch.int8
    assert torch.equal(scales, scales.bfloat16().float())
    error = (integers * scales[:, None] - weight).abs()
    # A scale that was rounded down to bfloat16 leaves the largest element up to half a percent.
    bound = scales / 2 + weight.abs().amax(1) * 2**-8
    assert (error <= bound[:, None]).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = weight_of((64, 33)).t().contiguous()
    weight[4] = 0
    integers, scales = quantize(weight)
    assert not integers[4].any()
    assert torch.isfinite(scales).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, INTEGER_ROWS, INTEGER_ROWS + 1, 16, 100])
@pytest.mark.parametrize("shape", [(96, 80), (97, 33), (256, 513)])
def test_it_multiplies_with_what_was_rounded(
    shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    weight = weight_of(shape, torch.float32).clamp(-1e3, 1e3).to(dtype)
    product = Int8Product(weight)
    product.derive()
    x = torch.randn(rows, shape[0]).to(dtype)
    integers, scales = quantize(weight.t())
    rounded = (integers * scales[:, None]).t().double()
    narrow = x.bfloat16().double()
    found = product(x)
    assert found.dtype is dtype
    error = (found.double() - narrow @ rounded).abs()
    assert (error <= 0.01 * (narrow.abs() @ rounded.abs())).all()


def test_new_weights_are_quantized_anew_and_dropped() -> None:
    weight = weight_of((256, 512))
    product = Int8Product(weight)
    product.derive()
    assert 0 < product.derived_bytes <= 3 * weight.numel()
    x = torch.randn(1, 256)
    before = product(x)
    weight.neg_()
    product.derive()
    torch.testing.assert_close(product(x), -before)
    product.drop()
    assert product.derived_bytes == 0
