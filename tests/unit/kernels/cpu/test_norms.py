"""CPU kernels of the residual stream: compared with torch, and independent of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.cpu_kernels import run_kernel
from torch import Tensor

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.norms import (
    ADD,
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    KINDS,
    SCALE_COLUMNS,
)

ROWS = [0, 1, 3, 40]
WIDTHS = [5, 48, 1000]
EPS = 1e-5


def rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    scale: float = 1.0,
    offset: float = 0.0,
    num_threads: int = 2,
) -> None:
    addend, width = 0 if x is None else x, residual.shape[1]
    numbers = [word_of_float(number) for number in (EPS, scale, offset)]
    kernel = ADD_RMS_NORM[str(weight.dtype).removeprefix("torch.")]
    run_kernel(
        kernel, len(residual), addend, residual, weight, out, width, *numbers,
        4 * residual.stride(0), num_threads=num_threads,
    )  # fmt: skip


def layer_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scale: float = 1.0,
    offset: float = 0.0,
    num_threads: int = 2,
) -> None:
    addend, width = 0 if x is None else x, residual.shape[1]
    numbers = [word_of_float(number) for number in (EPS, scale)]
    kernel = ADD_LAYER_NORM[str(weight.dtype).removeprefix("torch.")]
    run_kernel(
        kernel, len(residual), addend, residual, weight, out, width, *numbers,
        0 if bias is None else bias, 4 * residual.stride(0), word_of_float(offset),
        num_threads=num_threads,
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_x", [False, True])
def test_rms_norms_equal_torchs(has_x: bool, kind: str, rows: int, width: int) -> None:
    x, residual = torch.randn(rows, width), torch.randn(rows, width)
    weight = torch.randn(width).to(getattr(torch, kind))
    out = torch.full((rows, width), float("nan"))
    total = residual + x if has_x else residual.clone()
    rms_norm(x if has_x else None, residual, weight, out)
    assert torch.equal(residual, total)
    expected = F.rms_norm(total.double(), (width,), weight.double(), EPS)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_offset_is_added_to_the_weights_in_float32(kind: str, width: int) -> None:
    residual, out = torch.randn(9, width), torch.empty(9, width)
    weight = (torch.randn(width) * 0.01).to(getattr(torch, kind))
    rms_norm(None, residual, weight, out, offset=1.0)
    expected = F.rms_norm(residual.double(), (width,), weight.double() + 1, EPS)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    layer_norm(None, residual, weight, None, out, offset=1.0)
    expected = F.layer_norm(residual.double(), (width,), weight.double() + 1, None, EPS)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


def test_a_norm_in_place_has_the_bits_of_one_into_another_buffer() -> None:
    for width in WIDTHS:
        x, weight = torch.randn(7, width), torch.randn(width)
        out = torch.empty(7, width)
        rms_norm(None, x, weight, out)
        rms_norm(None, x, weight, x)
        assert torch.equal(x, out)
        layer_norm(None, x, weight, weight, out)
        layer_norm(None, x, weight, weight, x)
        assert torch.equal(x, out)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_of_some_columns_has_the_bits_of_one_of_these_alone(width: int) -> None:
    wide, weight = torch.randn(9, width + 7), torch.randn(width)
    before, some = wide.clone(), wide[:, :width]
    out, expected = torch.empty(9, width), torch.empty(9, width)
    rms_norm(None, some, weight, out)
    rms_norm(None, some.contiguous(), weight, expected)
    assert torch.equal(out, expected)
    layer_norm(None, some, weight, weight, out)
    layer_norm(None, some.contiguous(), weight, weight, expected)
    assert torch.equal(out, expected)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_full", [False, True])
def test_layer_norms_equal_torchs(is_full: bool, kind: str, rows: int, width: int) -> None:
    x, residual = torch.randn(rows, width), torch.randn(rows, width) + 3
    weight, bias = (torch.randn(width).to(getattr(torch, kind)) for _ in range(2))
    out = torch.full((rows, width), float("nan"))
    total = residual + x if is_full else residual.clone()
    layer_norm(x if is_full else None, residual, weight, bias if is_full else None, out)
    assert torch.equal(residual, total)
    added = bias.double() if is_full else None
    expected = F.layer_norm(total.double(), (width,), weight.double(), added, EPS)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_are_added_to_columns_of_wider_ones() -> None:
    x, wide = torch.randn(40, 17), torch.randn(40, 30)
    expected = wide.clone()
    expected[:, 5:22] += x
    run_kernel(ADD, 40, x, wide[:, 5:], 17, word_of_float(1.0), 4 * 30)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_every_kernel_adds_the_scaled_input(scale: float, width: int) -> None:
    x, weight, out = torch.randn(40, width), torch.randn(width), torch.empty(40, width)
    residuals = [torch.randn(40, width)] * 3
    expected = residuals[0] + torch.tensor(scale) * x
    residuals = [residual.clone() for residual in residuals]
    run_kernel(ADD, 40, x, residuals[0], width, word_of_float(scale), 4 * width)
    rms_norm(x, residuals[1], weight, out, scale)
    layer_norm(x, residuals[2], weight, None, out, scale)
    for residual in residuals:
        assert torch.equal(residual, expected)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, added = torch.randn(33, 100), torch.randn(33, 100)
    weight = torch.randn(100)

    def normed(rows: slice, num_threads: int) -> Tensor:
        outs = torch.empty(2, len(x[rows]), 100)
        rms_norm(added[rows], x[rows].clone(), weight, outs[0], 0.3, 1.0, num_threads)
        layer_norm(added[rows], x[rows].clone(), weight, weight, outs[1], 0.3, 1.0, num_threads)
        return outs

    whole = normed(slice(0, 33), 2)
    assert torch.equal(whole, torch.cat([normed(slice(i, i + 1), 1) for i in range(33)], 1))
    assert whole.isfinite().all()


@pytest.mark.parametrize("rows", ROWS)
def test_columns_have_factors(rows: int) -> None:
    x, factors = torch.randn(rows, 48), torch.randn(48)
    expected = x * (0.5 * factors)
    run_kernel(SCALE_COLUMNS, rows, x, 48, word_of_float(0.5), factors)
    assert torch.equal(x, expected)
