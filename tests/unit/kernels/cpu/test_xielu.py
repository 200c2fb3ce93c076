"""The activation xIELU on a CPU: torch's values, and bits that depend on no other row."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import run_kernel
from torch import Tensor

from shmllm_kernels.cpu.xielu import XIELU
from shmllm_kernels.reference.activation import xielu

NUMBERS = torch.tensor([0.4, -1.3, 0.5, -1e-6])


def activated(x: Tensor, num_threads: int = 2) -> Tensor:
    out = torch.full_like(x, float("nan"))
    run_kernel(XIELU, len(x), x, out, x.shape[1], NUMBERS, num_threads=num_threads)
    return out


@pytest.mark.parametrize("scale", [10.0, 1.0, 1e-3, 1e-7])
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 7), (17, 80), (3, 1376)])
def test_it_equals_torchs(rows: int, width: int, scale: float) -> None:
    x = torch.randn(rows, width) * scale
    if rows:
        x[0, :6] = torch.tensor([-1e4, 1e4, 0.0, -0.0, -0.5, -1e-6])
    expected = xielu(x.double(), NUMBERS.double())
    torch.testing.assert_close(
        activated(x).double(), expected, atol=4e-7 * min(scale, 1), rtol=3e-6
    )


def test_a_row_is_activated_to_the_same_bits_in_any_batch() -> None:
    x = torch.randn(33, 202)
    alone = [activated(row[None], num_threads=1) for row in x]
    assert torch.equal(activated(x), torch.cat(alone))


def test_nan_stays_nan() -> None:
    assert activated(torch.full((1, 5), float("nan"))).isnan().all()
