"""Activations of bounded gates and ups are those of torch."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import run_kernel

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.bounded_activation import ACTIVATE_BOUNDED
from shmllm_kernels.reference.activation import activate_bounded


@pytest.mark.parametrize("name", ["silu", "silu_clamped", "silu_shifted"])
@pytest.mark.parametrize("bound", [0.25, 2.0, 1e9])
def test_gates_and_ups_are_bounded(bound: float, name: str) -> None:
    x = torch.randn(40, 2 * 37) * 4
    out = torch.full((40, 37), torch.nan)
    run_kernel(ACTIVATE_BOUNDED[name], 40, x, out, 37, word_of_float(bound))
    torch.testing.assert_close(out, activate_bounded(x, name, bound), atol=1e-6, rtol=1e-5)
