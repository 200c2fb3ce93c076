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


def digits_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What int16 is: the high and the low digits of rows, and their scales."""
    largest = x.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0).div(largest), 0.0) * 256
    numbers = (x * inverse + 0.5).floor().int()
    high = (numbers + 128) >> 8
    return high, numbers - 256 * high, largest[:, 0] / 127 / 256


@pytest.mark.parametrize("k", [1, 5, 64, 100, 1100])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 35])
def test_numbers_of_16_bits_have_two_digits(rows: int, k: int) -> None:
    x = torch.randn(rows, k) * torch.logspace(-3, 3, rows)[:, None]
    x[rows // 2] = 0
    blocks, stride = in_tiles(x, "int16 tiles"), row_bytes(k, "int16")
    narrow, found = min(rows, 16), torch.zeros(rows, stride, dtype=torch.uint8)
    for row in range(rows):
        block = blocks[row // 16 * 16 * stride :][: narrow * stride].view(stride // 4, narrow, 4)
        found[row] = block[:, row % 16].flatten()
    steps = found[:, :-4].view(torch.int8).view(rows, -1, 2, 64)
    high, low, scales = digits_of(x)
    assert int(high.abs().max()) <= 127
    for digit, expected in zip((steps[:, :, 0], steps[:, :, 1]), (high, low), strict=True):
        assert torch.equal(digit.flatten(1)[:, :k].int(), expected)
        assert not digit.flatten(1)[:, k:].any(), "zeros fill the last step"
    assert torch.equal(found[:, -4:].contiguous().view(torch.float32)[:, 0], scales)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
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
