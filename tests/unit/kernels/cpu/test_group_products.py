"""Products of packed weights with activations in 8 or 16 bits by groups, and plain integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from support.cpu_kernels import NEEDS_INT8, guarded, run_kernel
from support.packed_matrices import (
    LAYOUTS,
    RECORD_BYTES,
    USUAL,
    PackedMatrix,
    drawn_matrix,
    values_of,
)
from support.variants import each_once, slow
from torch import Tensor

from shmllm_kernels.cpu.arithmetic import HAS_DOTS_OF_WORDS
from shmllm_kernels.cpu.group_products import MULTIPLY, X_KINDS
from shmllm_kernels.cpu.group_rounding import GROUPINGS, ROUND, num_planes, row_bytes
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from tests.unit.kernels.cpu.test_products import assert_close, multiply
from tests.unit.kernels.cpu.test_unpacking import usable

pytestmark = NEEDS_INT8
BYTE_KINDS = [kind for kind in LAYOUTS if kind not in ("fp8", "nf4")]
DTYPES = ("int8", "int16")
USUAL_PAIRS = each_once([kind for kind in BYTE_KINDS if kind in USUAL], DTYPES)
OTHER_PAIRS = [slow(kind, dtype) for kind in BYTE_KINDS if kind not in USUAL for dtype in DTYPES]


def rounded(x: Tensor, kind: str, num_threads: int = 2) -> Tensor:
    """Returns rows as the kernel rounds them, in memory of which nothing may be read behind."""
    stride = row_bytes(x.shape[1], kind)
    out = guarded(len(x) * stride)
    run_kernel(ROUND[kind], len(x), x, out, x.shape[1], stride, num_threads=num_threads)
    return out.view(len(x), stride)


def integers_in(planes: Tensor, kind: str) -> Tensor:
    """Returns the integers [rows, elements] of planes, uint8, as `group_arithmetic` has them."""
    if HAS_DOTS_OF_WORDS:
        return planes.view(torch.int16).unflatten(1, (-1, 2, 32)).mT.flatten(1).int()
    _, num_digits, _ = GROUPINGS[kind]
    digits = planes.view(torch.int8).unflatten(1, (-1, num_digits, 64)).int()
    weights = torch.tensor([[256], [1]], dtype=torch.int32)[-num_digits:]
    return (digits * weights).sum(2).flatten(1)


def plainly_rounded(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the integers [rows, groups, group] and the scales [rows, groups] of activations."""
    _, num_digits, group = GROUPINGS[kind]
    unit = 256.0 ** (num_digits - 1)
    filled = torch.nn.functional.pad(x, (0, -x.shape[1] % 64)).unflatten(1, (-1, group))
    largest, most = filled.abs().amax(-1), torch.tensor(127.0)  # torch turns 127 / x into 1 / x
    inverse = torch.where(largest > 0, most / largest, 0) * unit
    return torch.floor(filled * inverse[..., None] + 0.5), largest / most / unit


def values_rounded(x: Tensor, kind: str) -> Tensor:
    integers, scales = plainly_rounded(x, kind)
    return (integers.double() * scales[..., None]).flatten(1)[:, : x.shape[1]]


def multiply_rounded(
    x: Tensor, matrix: PackedMatrix, dtype: str, num_threads: int = 1, bias: Tensor | None = None
) -> Tensor:
    x_kind = X_KINDS[dtype, matrix.kind]
    return multiply(
        MULTIPLY[x_kind, matrix.kind, "bfloat16"], rounded(x, x_kind), matrix.integers,
        scale=matrix.scales, bias=bias, shape=(len(matrix.integers), matrix.k),
        num_threads=num_threads,
    )  # fmt: skip


def test_all_kinds_of_integers_have_kernels() -> None:
    assert set(X_KINDS) == {(dtype, kind) for dtype in DTYPES for kind in BYTE_KINDS}


@pytest.mark.parametrize("kind", GROUPINGS)
@pytest.mark.parametrize("k", [1, 40, 64, 200, 1088])
def test_groups_are_rounded_to_the_bit(kind: str, k: int) -> None:
    x = torch.randn(9, k) * torch.exp2(torch.randint(-40, 40, (9, 1)))
    x[3, : k // 2] = 0
    found = rounded(x, kind)
    integers, scales = plainly_rounded(x, kind)
    width, count = integers[0].numel() * num_planes(kind), scales.shape[1]
    assert torch.equal(integers_in(found[:, :width], kind), integers.flatten(1).int())
    numbers = [
        found[:, width + 4 * i * count : width + 4 * (i + 1) * count].contiguous() for i in range(3)
    ]
    sums = integers.sum(-1)
    assert torch.equal(numbers[0].view(torch.float32), scales)
    assert torch.equal(numbers[1].view(torch.float32), scales * sums)
    assert torch.equal(numbers[2].view(torch.int32), -sums.to(torch.int32))


@pytest.mark.parametrize("kind", GROUPINGS)
def test_numbers_whose_scale_has_no_inverse_are_zero(kind: str) -> None:
    x = torch.randn(6, 64) * torch.exp2(torch.tensor([-149, -140, -130, -126, -120, -117]))[:, None]
    found, size = rounded(x, kind), GROUPINGS[kind].size
    sums = 64 * num_planes(kind) + 8 * 64 // size
    assert not found[:, : 64 * num_planes(kind)].any()
    assert not found[:, sums : sums + 4 * 64 // size].any()


def exact_matrix(rows: int, k: int, kind: str) -> PackedMatrix:
    """A matrix whose parameters make all sums exact: scales are 1 (records: 1 or 0), and offsets
    and zeros are small integers."""
    matrix, layout = drawn_matrix(rows, k, kind), LAYOUTS[kind]
    if layout.stored == "e8m0":
        matrix.scales.fill_(128)
    elif layout.stored in RECORD_BYTES:
        count = 4 if layout.form == "offset" else 2
        records = matrix.scales.view(rows, -1, RECORD_BYTES[layout.stored])
        records[..., :count] = torch.ones(count // 2, dtype=torch.float16).view(torch.uint8)
        records[..., count:] &= 0x33 if layout.stored == "k2" else 3
    elif layout.stored == "e4m3":
        runs = matrix.scales.view(rows, -1, 8)
        runs[..., :4] = torch.ones(1).view(torch.uint8)
        runs[..., 4:] = 0x38 + runs[..., 4:] % 2 * 8  # 1 or 2
    else:
        dtype = getattr(torch, layout.stored)
        numbers = matrix.scales.view(dtype)
        drawn = torch.randint(0, 5, numbers.shape).to(dtype)
        matrix.scales.copy_(drawn.view(torch.uint8).view_as(matrix.scales))
    return matrix


@pytest.mark.parametrize(("kind", "dtype"), [*USUAL_PAIRS, *OTHER_PAIRS])
def test_integers_are_added_exactly(kind: str, dtype: str) -> None:
    """The activations are integers, and the largest one of a group makes its scale a power of two,
    so that nothing is rounded."""
    for columns, k in ((1, 40), (16, 64), (17, 320), (70, 1300)):
        matrix = exact_matrix(columns, usable(k, kind), kind)
        x = torch.randint(-127, 128, (21, matrix.k)).float()
        x[:, ::16] = 127
        if dtype == "int16":
            x[:, :64:16] = 127 * 64  # the scale of these groups is 1/4
        expected = x.double() @ values_of(matrix).double().T
        assert torch.equal(multiply_rounded(x, matrix, dtype, num_threads=2).double(), expected)


@pytest.mark.parametrize(("kind", "dtype"), [*USUAL_PAIRS, *OTHER_PAIRS])
def test_products_equal_float64_and_have_the_same_bits_in_any_batch(kind: str, dtype: str) -> None:
    for columns, k in ((1, 40), (13, 96), (50, 1300), (96, 2304)):
        matrix = drawn_matrix(columns, usable(k, kind), kind)
        x = torch.randn(ROWS_AT_ONCE + 15, matrix.k)
        whole = multiply_rounded(x, matrix, dtype, num_threads=2)
        assert_close(whole, values_rounded(x, X_KINDS[dtype, kind]), values_of(matrix))
        for rows in (1, 2, 3, 7, 8, 13):
            assert torch.equal(multiply_rounded(x[:rows].clone(), matrix, dtype), whole[:rows])
            assert torch.equal(multiply_rounded(x[-rows:].clone(), matrix, dtype), whole[-rows:])


def multiplied_and_added(a: float, b: float, c: float) -> float:
    """Returns the float32 next to a * b + c."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    around = near, np.nextafter(near, np.float32("inf")), np.nextafter(near, np.float32("-inf"))
    return float(min(around, key=lambda number: abs(Fraction(float(number)) - exact)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int4", "q8_0"])
def test_products_have_the_bits_of_their_definition(kind: str, dtype: str) -> None:
    """So they do not depend on the CPU's instructions."""
    matrix, x = drawn_matrix(5, 256, kind), torch.randn(3, 256)
    found = multiply_rounded(x, matrix, dtype)
    integers, scales = plainly_rounded(x, X_KINDS[dtype, kind])
    own = matrix.scales.view(torch.float16).view(5, -1).float()
    codes = (values_of(matrix).double().view(5, -1, 32) / own.double()[..., None]).round()
    totals = torch.einsum("rge,cge->rcg", integers.double(), codes)
    for row in range(3):
        factors = own * scales[row]
        for column in range(5):
            expected = 0.0
            for total, factor in zip(totals[row, column], factors[column], strict=True):
                expected = multiplied_and_added(total.float().item(), factor.item(), expected)
            assert found[row, column].item() == expected


def test_a_bias_is_added_once() -> None:
    matrix, x = drawn_matrix(37, 2100, "q8_0"), torch.randn(5, 2100)
    bias = torch.randn(37).bfloat16()
    plain = multiply_rounded(x, matrix, "int16")
    assert torch.equal(multiply_rounded(x, matrix, "int16", bias=bias), plain + bias.float())


def test_nan_in_a_row_does_not_change_other_rows() -> None:
    matrix, x = drawn_matrix(20, 256, "q4_k"), torch.randn(9, 256)
    expected = multiply_rounded(x, matrix, "int16")
    x[3, 100], x[6, 7] = float("nan"), float("inf")
    found = multiply_rounded(x, matrix, "int16")
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(found[others], expected[others])
    assert not found[[3, 6]].isfinite().any()
