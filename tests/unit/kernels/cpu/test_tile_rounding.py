"""Rounded activations in blocks: the numbers of `rounding`, in another order."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import guarded, run_kernel
from torch import Tensor

from shmllm_kernels.cpu.tile_rounding import ROUND, TILED, rounded_bytes, row_bytes
from tests.unit.kernels.cpu.test_rounding import rounded


def in_tiles(x: Tensor, name: str) -> Tensor:
    """The memory that ROUND writes, bytes; 0xff where it does not write, which is NaN."""
    rows, k = x.shape
    stride, kind = row_bytes(k, TILED[name]), TILED[name]
    out = guarded(rounded_bytes(rows, k, kind))
    run_kernel(ROUND[name], rows, x, out, k, stride)
    assert rows >= 16 or (out[rows * stride :] == 0xFF).all(), "wrote after the last row"
    return out


@pytest.mark.parametrize("kind", TILED.values())
@pytest.mark.parametrize("k", [1, 5, 64, 100, 1100])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 35])
def test_blocks_have_the_numbers_of_rows(rows: int, k: int, kind: str) -> None:
    x = torch.randn(rows, k) * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    blocks, stride = in_tiles(x, f"{kind} tiles"), row_bytes(k, kind)
    narrow, numbers = min(rows, 16), torch.zeros(rows, stride, dtype=torch.uint8)
    for row in range(rows):
        block = blocks[row // 16 * 16 * stride :][: narrow * stride].view(stride // 4, narrow, 4)
        numbers[row] = block[:, row % 16].flatten()
    expected = rounded(x, kind)
    num_bytes = k * (2 if kind == "bfloat16" else 1)
    assert torch.equal(numbers[:, :num_bytes], expected[:, :num_bytes])
    if kind == "int8":
        assert torch.equal(numbers[:, -4:], expected[:, -4:]), "the scales"
        numbers = numbers[:, :-4]
    assert not numbers[:, num_bytes:].any(), "zeros fill the last step"
