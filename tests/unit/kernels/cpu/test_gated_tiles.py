"""Gate, up and activation by tile instructions: the bits of three kernels, emulated and by AMX."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.cpu_kernels import NEEDS_BFLOAT16, guarded, run_kernel
from support.emulated_tiles import EMULATED_GATE_AND_UP, EMULATED_MULTIPLY
from support.packed_matrices import drawn_matrix
from support.variants import each_once, slow
from torch import Tensor

from shmllm_kernels.cpu import Kernel, gated_tiles, matrix_tiles
from shmllm_kernels.cpu.gated_tiles import ACTIVATIONS
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.cpu.rows import ACTIVATE
from shmllm_kernels.cpu.tile_rounding import rounded_bytes, row_bytes
from tests.unit.kernels.cpu.test_matrix_tiles import NEEDS_AMX, multiply
from tests.unit.kernels.cpu.test_products import quantized
from tests.unit.kernels.cpu.test_tile_rounding import in_tiles

X_KIND = "bfloat16 tiles"
ROWS = (1, 2, 16, 17, 33, 2 * ROWS_AT_ONCE + 5)


def gate_and_up(
    kernel: Kernel, x: Tensor, weight: Tensor, inner: int, scale: Tensor | int, threads: int
) -> Tensor:
    """Rounds x; returns the rounded activation, in blocks."""
    rows, k = x.shape
    blocks = in_tiles(x, X_KIND)
    out, stride = guarded(rounded_bytes(rows, inner, "bfloat16")), row_bytes(inner, "bfloat16")
    run_kernel(
        kernel, rows, blocks, row_bytes(k, "bfloat16"), out, stride, weight, inner, k, scale,
        num_threads=threads,
    )  # fmt: skip
    return out


def in_three_steps(
    kernel: Kernel, kind: str, x: Tensor, weight: Tensor, inner: int, scale: Tensor | None,
    activation: str,
) -> Tensor:  # fmt: skip
    kinds = X_KIND, kind, "bfloat16"
    projected = multiply(kinds, x, weight, scale=scale, kernels={kinds: kernel})
    activated = torch.empty(len(x), inner)
    run_kernel(ACTIVATE[activation, True], len(x), projected, activated, inner)
    return in_tiles(activated, X_KIND)


def rows_in(blocks: Tensor, num_rows: int, k: int, kind: str = "bfloat16") -> Tensor:
    """What the rows in blocks have, as int16."""
    stride = row_bytes(k, kind)
    narrow, rows = min(num_rows, 16), torch.zeros(num_rows, stride // 4, 4, dtype=torch.uint8)
    for row in range(num_rows):
        block = blocks[row // 16 * 16 * stride :][: narrow * stride].view(stride // 4, narrow, 4)
        rows[row] = block[:, row % 16]
    return rows.flatten(1).view(torch.int16)


def assert_same(kind: str, activation: str, k: int, inner: int, rows: int, by_amx: bool) -> None:
    gated, plain = (
        (gated_tiles.GATE_AND_UP, matrix_tiles.MULTIPLY)
        if by_amx
        else (EMULATED_GATE_AND_UP, EMULATED_MULTIPLY)
    )
    x, scale = torch.randn(rows, k), None
    weight = torch.randn(2 * inner, k).bfloat16()
    if kind in ("int8", "int4", "int4-g64"):
        matrix = quantized(2 * inner, k, (X_KIND, kind, "bfloat16"))
        weight, scale = matrix.integers, matrix.scales
    elif kind != "bfloat16":
        matrix = drawn_matrix(2 * inner, k, kind)
        weight, scale = matrix.integers, matrix.scales
    multiplier = plain[X_KIND, kind, "bfloat16"]
    expected = in_three_steps(multiplier, kind, x, weight, inner, scale, activation)
    kernel = gated[X_KIND, kind, activation]
    for threads in (1, 2):
        found = gate_and_up(kernel, x, weight, inner, 0 if scale is None else scale, threads)
        assert torch.equal(rows_in(found, rows, inner), rows_in(expected, rows, inner))
        if rows < 16:
            assert (found[rows * row_bytes(inner, "bfloat16") :] == 0xFF).all()


SHAPES = list(itertools.product([32, 100, 576, 1100], [32, 64, 96, 224]))


@pytest.mark.parametrize(
    ("shape", "rows", "activation"), each_once(SHAPES, ROWS, list(ACTIVATIONS))
)
def test_the_bits_are_those_of_three_kernels(
    shape: tuple[int, int], rows: int, activation: str
) -> None:
    k, inner = shape
    assert_same("bfloat16", activation, k, inner, rows, by_amx=False)


@NEEDS_BFLOAT16
@pytest.mark.parametrize("kind", ["int8", "int4", slow("int4-g64"), slow("q5_k"), slow("q4_1")])
@pytest.mark.parametrize("rows", [1, 35])
def test_packed_weights_have_these_bits_too(kind: str, rows: int) -> None:
    assert_same(kind, "silu", 1280, 64, rows, by_amx=False)


@NEEDS_AMX
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4", slow("q6_k"), slow("fp8")])
@pytest.mark.parametrize("rows", ROWS)
def test_amx_has_the_bits_of_its_three_kernels(kind: str, rows: int) -> None:
    assert_same(kind, "silu", 1280, 160, rows, by_amx=True)
