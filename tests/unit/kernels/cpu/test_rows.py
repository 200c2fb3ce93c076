"""CPU kernels of single rows: compared with torch, and independent of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm_kernels.cpu import Kernel, KernelProgram, word_of_float
from shmllm_kernels.cpu.rows import ADD_RMS_NORM, EMBED, GATHER, ROPE_TABLES, SILU_AND_MUL

KINDS = ["float32", "float16", "bfloat16"]
ROWS = [0, 1, 3, 40]


def run(kernel: Kernel, rows: int, *operands: Tensor | int, num_threads: int = 2) -> None:
    num_rows = np.array([rows])
    numbers = [o.data_ptr() if isinstance(o, Tensor) else o for o in operands]
    program = KernelProgram(num_threads)
    program.record(kernel, [num_rows.ctypes.data, *numbers])
    program.replay()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_looked_up_except_for_negative_ids(kind: str, rows: int) -> None:
    table = torch.randn(50, 20).to(getattr(torch, kind))
    ids = torch.randint(0, 50, (rows,))
    ids[::3] = -1
    out = torch.full((rows, 20), 7.0)
    run(EMBED[kind], rows, ids, table, out, 20)
    expected = torch.where(ids[:, None] < 0, torch.tensor(7.0), table[ids].float())
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_gathered(rows: int) -> None:
    source, out = torch.randn(60, 24), torch.full((41, 24), -1.0)
    indices = torch.randint(0, 60, (rows,))
    run(GATHER, rows, indices, source, out, 24)
    assert torch.equal(out[:rows], source[indices])
    assert (out[rows:] == -1).all()


@pytest.mark.parametrize("width", [5, 48, 1000])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_x", [False, True])
def test_norms_equal_torchs(has_x: bool, kind: str, rows: int, width: int) -> None:
    x, residual = torch.randn(rows, width), torch.randn(rows, width)
    weight = torch.randn(width).to(getattr(torch, kind))
    out = torch.full((rows, width), float("nan"))
    total = residual + x if has_x else residual.clone()
    run(
        ADD_RMS_NORM[kind], rows, x if has_x else 0, residual, weight, out, width,
        word_of_float(1e-5),
    )  # fmt: skip
    assert torch.equal(residual, total)
    expected = F.rms_norm(total.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [3, 80, 688])
def test_the_gated_activation_equals_torchs(rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 10
    if rows:
        gate_up[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    out = torch.full((rows, width), float("nan"))
    run(SILU_AND_MUL, rows, gate_up, out, width)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_rope_tables_are_cosines_and_sines_of_float32_angles(scale: float) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131071])
    frequencies = 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    cos, sin = torch.empty(5, 32), torch.empty(5, 32)
    run(ROPE_TABLES, 5, positions, frequencies, 32, cos, sin, word_of_float(scale))
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos() * scale, atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin() * scale, atol=2e-7, rtol=0)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = torch.randn(33, 100), torch.randn(100)
    whole, alone = torch.empty(33, 100), torch.empty(33, 100)
    run(ADD_RMS_NORM["float32"], 33, 0, x.clone(), weight, whole, 100, word_of_float(1e-6))
    for i in range(33):
        row = x[i : i + 1].clone()
        out = alone[i : i + 1]
        run(
            ADD_RMS_NORM["float32"], 1, 0, row, weight, out, 100, word_of_float(1e-6),
            num_threads=1,
        )  # fmt: skip
    assert torch.equal(whole, alone)
    assert math.isfinite(float(whole.sum()))
