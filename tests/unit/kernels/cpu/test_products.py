"""CPU matrix products: compared with float64, and independent of the batch to the last bit."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.cpu_kernels import NEEDS_BFLOAT16
from torch import Tensor

from shmllm.models.matrices import QUANTIZATIONS
from shmllm.models.quantized import QuantizedMatrix
from shmllm_kernels.cpu import Kernel, KernelProgram
from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16
from shmllm_kernels.cpu.product_tiles import TILE_COLUMNS
from shmllm_kernels.cpu.products import DTYPES, MULTIPLY, ROWS_AT_ONCE

LIBC = ctypes.CDLL(None)
Kinds = tuple[str, str, str]
WIDENED = [("float32", kind, kind) for kind in DTYPES]
KINDS = [*WIDENED, pytest.param(("bfloat16",) * 3, marks=NEEDS_BFLOAT16)]
"""The dtype names of activations, weights and bias."""
ROUNDED = ("int8", "int4", "int4-g64")
PACKED = [
    *(("float32", kind, "bfloat16") for kind in ROUNDED),
    *(pytest.param(("bfloat16", kind, "float16"), marks=NEEDS_BFLOAT16) for kind in ROUNDED),
]
"""Likewise, of weights that are quantized here; `test_unpacking` has the other packed ones."""
FLOAT32 = MULTIPLY["float32", "float32", "float32"]


def drawn(rows: int, k: int, kind: str) -> Tensor:
    """Random numbers of the dtype of that name."""
    return torch.randn(rows, k).to(getattr(torch, kind))


def multiply(
    kernel: Kernel,
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    num_threads: int = 1,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Runs one product, whose output memory is NaN beforehand. shape: [columns, k], if the weight
    is packed."""
    rows, columns = len(x), len(weight)
    out = torch.full((rows + 1, columns), float("nan"))
    num_rows = np.array([rows])
    program = KernelProgram(num_threads)
    places = [x.data_ptr(), x.element_size() * x.shape[1], out.data_ptr(), 4 * columns]
    extras = [0 if extra is None else extra.data_ptr() for extra in (scale, bias)]
    program.record(
        kernel,
        [num_rows.ctypes.data, *places, weight.data_ptr(), *(shape or weight.shape), *extras],
    )
    program.replay()
    assert out[rows:].isnan().all(), "wrote after the last row"
    return out[:rows]


def quantized(rows: int, k: int, kinds: Kinds) -> QuantizedMatrix:
    """A matrix of random numbers, rounded to few bits."""
    dtype = getattr(torch, kinds[2])
    matrix = QUANTIZATIONS[kinds[1]].make(
        (rows, k), dtype, lambda *a: torch.empty(a[0], dtype=a[1])
    )
    return matrix.copy_(torch.randn(rows, k))


def multiply_quantized(
    kinds: Kinds, x: Tensor, matrix: QuantizedMatrix, num_threads: int = 1
) -> Tensor:
    weight, scale = matrix.integers.view(torch.uint8), matrix.scales
    kernel, shape = MULTIPLY[kinds], matrix.shape
    return multiply(kernel, x, weight, scale=scale, num_threads=num_threads, shape=shape)


def assert_close(found: Tensor, x: Tensor, weight: Tensor, factors: Tensor | float = 1.0) -> None:
    """Compares with float64, within the rounding error of a float32 sum of that length."""
    wide = weight.double() * factors
    error = (found.double() - x.double() @ wide.T).abs()
    assert (error <= 2e-6 * (x.double().abs() @ wide.abs().T) + 1e-30).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, ROWS_AT_ONCE + 3])
@pytest.mark.parametrize(
    ("columns", "k"), [(1, 40), (6, 16), (7, 5), (64, 33), (97, 48), (256, 100)]
)
@pytest.mark.parametrize("kinds", KINDS)
def test_product_equals_float64(
    kinds: Kinds, columns: int, k: int, rows: int, num_threads: int
) -> None:
    weight, x = drawn(columns, k, kinds[1]), drawn(rows, k, kinds[0])
    assert_close(multiply(MULTIPLY[kinds], x, weight, num_threads=num_threads), x, weight)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_bias_is_added_once(kinds: Kinds) -> None:
    weight, x = drawn(TILE_COLUMNS * 17 + 5, 40, kinds[1]), drawn(9, 40, kinds[0])
    bias = torch.randn(len(weight)).to(weight.dtype)
    found = multiply(MULTIPLY[kinds], x, weight, bias=bias, num_threads=2)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", DTYPES)
def test_integers_are_scaled_by_column(kind: str) -> None:
    weight = torch.randint(-127, 128, (53, 70), dtype=torch.int8)
    scale, bias = torch.rand(53) / 100, torch.randn(53).to(getattr(torch, kind))
    x = torch.randn(6, 70)
    found = multiply(
        MULTIPLY["float32", "int8", kind], x, weight, scale=scale, bias=bias, num_threads=2
    )
    expected = x.double() @ (weight.double() * scale[:, None].double()).T + bias.double()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kinds", PACKED)
@pytest.mark.parametrize("rows", [1, 4, 9, ROWS_AT_ONCE + 3])
@pytest.mark.parametrize(
    ("columns", "k"), [(1, 40), (6, 64), (7, 5), (64, 100), (97, 1100), (50, 2112)]
)
def test_packed_weights_equal_float64(kinds: Kinds, columns: int, k: int, rows: int) -> None:
    x, matrix = drawn(rows, k, kinds[0]), quantized(columns, k, kinds)
    if kinds[1] == "int8":
        values = matrix.integers * matrix.scales.double()[:, None]
    else:
        matrix.dtype = getattr(torch, kinds[0])
        values = matrix.clone()  # rounded to the dtype of activations
    assert_close(multiply_quantized(kinds, x, matrix, num_threads=2), x, values)


@pytest.mark.parametrize("kinds", PACKED)
def test_packed_weights_give_a_row_the_same_bits_in_any_batch(kinds: Kinds) -> None:
    x, matrix = drawn(ROWS_AT_ONCE + 9, 1300, kinds[0]), quantized(61, 1300, kinds)
    whole = multiply_quantized(kinds, x, matrix, num_threads=2)
    for rows in (1, 3, 8, 17):
        assert torch.equal(multiply_quantized(kinds, x[:rows].clone(), matrix), whole[:rows])
        last = multiply_quantized(kinds, x[-rows:].clone(), matrix, num_threads=2)
        assert torch.equal(last, whole[-rows:])


def test_unpacking_reads_nothing_behind_the_weights() -> None:
    """The last row ends where the memory that may be read ends."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    assert LIBC.mprotect(ctypes.c_void_p(base + page), page, 0) == 0
    for kinds in (each for each in MULTIPLY if each[1] in ROUNDED):
        if kinds[0] == "int8" or (kinds[0] == "bfloat16" and not HAS_BFLOAT16):
            continue
        matrix = quantized(7, 200, kinds)
        size = matrix.integers.nbytes
        copy = torch.from_numpy(np.frombuffer(memory, np.uint8, size, page - size))
        copy.copy_(matrix.integers.view(torch.uint8).flatten())
        x = drawn(5, 200, kinds[0])
        moved = matrix.of_parts(copy.view(7, -1).view(matrix.integers.dtype), matrix.scales)
        found = multiply_quantized(kinds, x, moved)
        assert torch.equal(found, multiply_quantized(kinds, x, matrix))


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("k", [16, 48, 100, 1536])
def test_a_row_has_the_same_bits_in_any_batch(kinds: Kinds, k: int) -> None:
    """Computes rows alone and among others, at any index, with one thread and with two."""
    weight, x = drawn(61, k, kinds[1]), drawn(2 * ROWS_AT_ONCE + 7, k, kinds[0])
    tested = torch.cat([torch.arange(9), torch.arange(len(x) - 20, len(x))])
    alone = torch.full((len(x), 61), float("nan"))
    for row in tested:
        alone[row] = multiply(MULTIPLY[kinds], x[row][None].contiguous(), weight)
    for rows in (2, 3, 4, 7, 16, ROWS_AT_ONCE + 1, len(x)):
        for num_threads in (1, 2):
            found = multiply(MULTIPLY[kinds], x[-rows:].clone(), weight, num_threads=num_threads)
            there = tested[tested >= len(x) - rows]
            assert torch.equal(found[there - (len(x) - rows)], alone[there])


def test_a_column_has_the_same_bits_in_any_tile() -> None:
    weight, x = torch.randn(96, 200), torch.randn(5, 200)
    whole = multiply(FLOAT32, x, weight)
    for first in (35, 95, 94):
        part = multiply(FLOAT32, x, weight[first:].clone())
        assert torch.equal(part, whole[:, first:])


def test_nan_in_a_row_does_not_change_other_rows() -> None:
    weight, x = torch.randn(64, 48), torch.randn(8, 48)
    clean = multiply(FLOAT32, x, weight)
    x[3, 5] = float("nan")
    found = multiply(FLOAT32, x, weight, num_threads=2)
    assert found[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[keep], clean[keep])
