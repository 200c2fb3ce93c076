"""Products of packed weights and packed embeddings: each weight has the bits of its layout."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import support.narrow_vectors
import torch
from support.cpu_kernels import NEEDS_BFLOAT16, guarded, run_kernel
from support.packed_matrices import (
    LAYOUTS,
    USUAL,
    PackedMatrix,
    depth_step,
    drawn_matrix,
    values_of,
)
from support.variants import slow
from torch import Tensor

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.products import MULTIPLY, ROWS_AT_ONCE
from shmllm_kernels.cpu.rows import EMBED_PACKED
from shmllm_kernels.cpu.simd import LANES
from shmllm_kernels.cpu.unpacking import PACKINGS
from tests.unit.kernels.cpu.test_products import assert_close, multiply

SHOWN = [kind for kind in LAYOUTS if kind in USUAL and kind != "nf4"]
KINDS = [kind if kind in SHOWN else slow(kind) for kind in LAYOUTS]
OF_BFLOAT16 = [
    pytest.param(
        kind, "bfloat16", marks=[NEEDS_BFLOAT16, *([] if kind == "q4_k" else [pytest.mark.slow])]
    )
    for kind in LAYOUTS
]
EACH = [
    *((kind, "float32") if kind in SHOWN else slow(kind, "float32") for kind in LAYOUTS),
    *OF_BFLOAT16,
]
"""The kinds of weights, each with the dtype names of activations."""


def usable(k: int, kind: str) -> int:
    """Returns the depth next to k that rows of a kind can have."""
    step = depth_step(kind)
    return -(-k // step) * step


def multiply_packed(x: Tensor, matrix: PackedMatrix, num_threads: int = 1) -> Tensor:
    kernel = MULTIPLY[str(x.dtype).removeprefix("torch."), matrix.kind, "bfloat16"]
    return multiply(
        kernel, x, matrix.integers, scale=matrix.scales, shape=(len(matrix.integers), matrix.k),
        num_threads=num_threads,
    )  # fmt: skip


def test_all_kinds_are_tested() -> None:
    assert set(PACKINGS) == {"int8", *LAYOUTS}


@pytest.mark.parametrize(("kind", "x_kind"), EACH)
def test_each_weight_has_the_bits_of_its_layout(kind: str, x_kind: str) -> None:
    """A row of activations that has a single one shows one weight of each column."""
    dtype = getattr(torch, x_kind)
    for k in sorted({usable(k, kind) for k in (40, 96, 160, 576, 1152, 2304)}):
        matrix = drawn_matrix(7, k, kind)
        x = torch.eye(k)[torch.randperm(k)[:400]]
        expected = x @ values_of(matrix).to(dtype).float().T
        assert torch.equal(multiply_packed(x.to(dtype), matrix, num_threads=2), expected)


@pytest.mark.parametrize(("kind", "x_kind"), EACH)
def test_products_equal_float64_and_have_the_same_bits_in_any_batch(kind: str, x_kind: str) -> None:
    dtype = getattr(torch, x_kind)
    for columns, k in ((1, 40), (6, 64), (13, 96), (50, 1300)):
        matrix = drawn_matrix(columns, usable(k, kind), kind)
        x = torch.randn(ROWS_AT_ONCE + 9, matrix.k).to(dtype)
        whole = multiply_packed(x, matrix, num_threads=2)
        assert_close(whole, x, values_of(matrix).to(dtype))
        for rows in (1, 3, 8, 17):
            assert torch.equal(multiply_packed(x[:rows].clone(), matrix), whole[:rows])
            assert torch.equal(multiply_packed(x[-rows:].clone(), matrix), whole[-rows:])


def products_with_one(matrix: PackedMatrix, x_kind: str) -> Tensor:
    """Returns the first weight of each column, as a product shows it."""
    x = torch.zeros(2, matrix.k, dtype=getattr(torch, x_kind))
    x[:, 0] = 1
    return multiply_packed(x, matrix)[0]


@pytest.mark.parametrize("x_kind", ["float32", pytest.param("bfloat16", marks=NEEDS_BFLOAT16)])
@pytest.mark.parametrize("kind", ["q8_0", "fp8"])
def test_all_codes_of_8_bits(kind: str, x_kind: str) -> None:
    """This includes float8 that is not a number."""
    matrix = drawn_matrix(256, 64, kind)
    matrix.integers.zero_()[:, 0] = torch.arange(256)
    expected = values_of(matrix)[:, 0].to(getattr(torch, x_kind)).float()
    assert expected.isnan().sum() == (2 if kind == "fp8" else 0)
    found = products_with_one(matrix, x_kind)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def test_all_powers_of_two() -> None:
    matrix = drawn_matrix(255, 64, "mxfp4")
    matrix.integers.fill_(2)
    matrix.scales[:] = torch.arange(255)[:, None]
    expected = 2.0 ** (torch.arange(255).double() - 127)
    assert torch.equal(products_with_one(matrix, "float32").double(), expected)


@pytest.mark.parametrize(
    ("lanes", "kinds"),
    [
        (8, ("q5_k", "fp8", "iq2")),
        (4, ("q6_k", "mxfp4", "q2_k")),
        *(slow(n, tuple(LAYOUTS)) for n in (8, 4)),
    ],
)
def test_weights_have_the_same_bits_in_narrower_vectors(lanes: int, kinds: tuple[str, ...]) -> None:
    if lanes > LANES:
        pytest.skip("the CPU has no vectors of that width")
    command = [sys.executable, support.narrow_vectors.__file__, str(lanes), *kinds]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, env=environment, timeout=300)


@pytest.mark.parametrize("kind", ["int8", *KINDS])
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_embeddings_have_the_bits_of_their_rows(scale: float, kind: str) -> None:
    for width in {usable(width, kind) for width in (20, 96, 1024, 2304 + 32)}:
        table, given = drawn_matrix(9, width, kind), torch.randn(30, width)
        ids, positions = torch.randint(0, 9, (30,)), torch.randint(0, 5, (30,))
        ids[::4], ids[5] = -1, 8
        tokens = values_of(table)[ids] * scale
        expected = torch.where(ids[:, None] < 0, given * 2.5, tokens)
        for learned in (None, torch.randn(5, width).bfloat16()):
            out = guarded(given.nbytes).view(torch.float32).view(30, width).copy_(given)
            run_kernel(
                EMBED_PACKED[kind, "bfloat16"], 30, ids, table.integers, out, width,
                word_of_float(scale), word_of_float(2.5), positions,
                0 if learned is None else learned, 0, 9, 0, 0, 0, table.scales,
            )  # fmt: skip
            added = 0 if learned is None else learned[positions].float()
            assert torch.equal(out, expected + added)
