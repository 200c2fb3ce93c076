"""Norms and activations that round their results: the bits of two kernels."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import guarded, run_kernel
from support.variants import slow

from shmllm_kernels.cpu import norms, rounded_rows, word_of_float
from shmllm_kernels.cpu.rows import ACTIVATE
from shmllm_kernels.cpu.tile_rounding import TILED, rounded_bytes, row_bytes
from tests.unit.kernels.cpu.test_gated_tiles import rows_in
from tests.unit.kernels.cpu.test_tile_rounding import in_tiles

NAMES = [slow(name) if name == "int16 tiles" else name for name in TILED]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 17, 33, 50])
@pytest.mark.parametrize("has_x", [False, True])
def test_bits_are_those_of_a_norm_and_a_rounding(
    has_x: bool, rows: int, num_threads: int, name: str
) -> None:
    width, kind = 100, TILED[name]
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    sums, numbers = residual.clone(), [word_of_float(number) for number in (1e-5, 0.5, 1.0)]
    addend, expected = x if has_x else 0, torch.empty(rows, width)
    numbers.append(4 * width)
    run_kernel(norms.ADD_RMS_NORM["float32"], rows, addend, sums, weight, expected, width, *numbers)
    out, rounded = torch.empty(rows, width), guarded(rounded_bytes(rows, width, kind))
    run_kernel(
        rounded_rows.ADD_RMS_NORM["float32", name], rows, addend, residual, weight, out, width,
        *numbers, rounded, row_bytes(width, kind), num_threads=num_threads,
    )  # fmt: skip
    assert torch.equal(residual, sums)
    assert torch.equal(out, expected)
    want = in_tiles(expected, name)
    assert torch.equal(rows_in(rounded, rows, width, kind), rows_in(want, rows, width, kind))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 9, 33])
@pytest.mark.parametrize(("activation", "is_gated"), [("silu", True), ("gelu_tanh", False)])
def test_bits_are_those_of_an_activation_and_a_rounding(
    activation: str, is_gated: bool, rows: int, name: str
) -> None:
    width, kind = 100, TILED[name]
    x, expected = torch.randn(rows, (1 + is_gated) * width), torch.empty(rows, width)
    run_kernel(ACTIVATE[activation, is_gated], rows, x, expected, width)
    out, rounded = torch.empty(rows, width), guarded(rounded_bytes(rows, width, kind))
    kernel = rounded_rows.ACTIVATE[activation, is_gated, name]
    run_kernel(kernel, rows, x, out, width, rounded, row_bytes(width, kind))
    assert torch.equal(out, expected)
    want = in_tiles(expected, name)
    assert torch.equal(rows_in(rounded, rows, width, kind), rows_in(want, rows, width, kind))
