"""Rounded activations, and products of int8 with int8."""

from __future__ import annotations

import math

import pytest
import torch
from support.cpu_kernels import NEEDS_INT8, run_kernel
from torch import Tensor

from shmllm_kernels.cpu.products import DTYPES, MULTIPLY, ROWS_AT_ONCE, width_of
from shmllm_kernels.cpu.rounding import ROUND, row_bytes
from tests.unit.kernels.cpu.test_products import multiply

FLOAT32 = MULTIPLY["int8", "int8", "float32"]
GUARD = 99


def rounded(x: Tensor, kind: str, num_threads: int = 2) -> Tensor:
    """The rows that ROUND writes, uint8."""
    rows, k = x.shape
    stride = row_bytes(k, kind)
    out = torch.full((rows + 1, stride), GUARD, dtype=torch.uint8)
    run_kernel(ROUND[kind], rows, x, out, k, stride, num_threads=num_threads)
    assert (out[rows:] == GUARD).all(), "wrote after the last row"
    return out[:rows]


def parts_of(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The integers and the scales of rows in int8."""
    return rows[:, :k].view(torch.int8), rows[:, -4:].contiguous().view(torch.float32)[:, 0]


def random_integers(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 33), (40, 100)])
def test_bfloat16_is_rounded_as_torch_rounds(shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 100
    found = rounded(x, "bfloat16").view(torch.bfloat16)
    assert torch.equal(found, x.bfloat16())


@pytest.mark.parametrize("k", [1, 5, 64, 100, 1025, 2100])
def test_int8_is_within_half_a_step_and_the_corrections_are_exact(k: int) -> None:
    x = torch.randn(7, k) * torch.tensor([1e-30, 1e-3, 1, 7, 1e3, 1e30, 0])[:, None]
    rows = rounded(x, "int8")
    integers, scales = parts_of(rows, k)
    assert torch.equal(scales, x.abs().amax(1) / 127)
    error = (integers.double() * scales[:, None].double() - x.double()).abs()
    assert (error <= 0.5001 * scales[:, None]).all()
    assert integers.abs().max() == 127
    num_parts, width = math.ceil(k / 1024), width_of("int8")  # of this CPU's instructions
    depth = math.ceil(math.ceil(k / num_parts) / width) * width
    begin = math.ceil(k / 4) * 4
    corrections = rows[:, begin : begin + 4 * num_parts].contiguous().view(torch.int32)
    for part, sums in enumerate(integers.long().split(depth, 1)):
        assert torch.equal(corrections[:, part].long(), -128 * sums.sum(1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_such_a_scale_and_changes_no_other(bad: float) -> None:
    x = torch.randn(3, 70)
    clean = rounded(x, "int8")
    x[1, 60] = bad
    found = rounded(x, "int8")
    assert not math.isfinite(parts_of(found, 70)[1][1])
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@NEEDS_INT8
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, ROWS_AT_ONCE + 3])
@pytest.mark.parametrize(("columns", "k"), [(1, 40), (6, 16), (7, 5), (97, 48), (64, 1100)])
def test_products_of_integers_are_exact(columns: int, k: int, rows: int, num_threads: int) -> None:
    x = rounded(torch.randn(rows, k), "int8")
    integers, scales = parts_of(x, k)
    weight, scale = random_integers(columns, k), torch.rand(columns)
    found = multiply(FLOAT32, x, weight, scale=scale, num_threads=num_threads)
    exact = (integers.long() @ weight.long().T).float()
    assert torch.equal(found, exact * scales[:, None] * scale)


@NEEDS_INT8
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_are_exact(sign: int) -> None:
    k = 1024
    x = rounded(torch.full((5, k), 3.0), "int8")
    weight = torch.full((13, k), 127 * sign, dtype=torch.int8)
    found = multiply(FLOAT32, x, weight, scale=torch.ones(13))
    assert torch.equal(found, torch.full((5, 13), float(127 * 127 * k * sign)) * (3 / 127))


@NEEDS_INT8
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_after_the_scales(dtype: str) -> None:
    x, weight = rounded(torch.randn(6, 70), "int8"), random_integers(53, 70)
    scale, bias = torch.rand(53) / 100, torch.randn(53).to(getattr(torch, dtype))
    integers, scales = parts_of(x, 70)
    exact = (integers.long() @ weight.long().T).float() * scales[:, None] * scale
    kernel = MULTIPLY["int8", "int8", dtype]
    found = multiply(kernel, x, weight, scale=scale, bias=bias, num_threads=2)
    assert torch.equal(found, exact + bias.float())


@NEEDS_INT8
@pytest.mark.parametrize("k", [16, 100, 1536])
def test_a_row_has_the_same_bits_in_any_batch(k: int) -> None:
    x, weight = rounded(torch.randn(2 * ROWS_AT_ONCE + 7, k), "int8"), random_integers(61, k)
    scale = torch.rand(61)
    whole = multiply(FLOAT32, x, weight, scale=scale, num_threads=2)
    for row in (0, 1, 5, ROWS_AT_ONCE, len(x) - 1):
        alone = multiply(FLOAT32, x[row][None].contiguous(), weight, scale=scale)
        assert torch.equal(alone[0], whole[row])
