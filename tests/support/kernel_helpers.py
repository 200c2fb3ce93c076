"""Inputs and comparisons for the tests of the Triton kernels, interpreted or on a GPU.

A test draws random numbers from the fixture `draw`, which prints its seed, and fills the outputs of
a kernel with `poisoned` values before it runs the kernel. Each folder has fixtures `dtype` and
`device`.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

SEED_VARIABLE = "SHMLLM_KERNEL_SEED"


class Draw:
    """Random tensors of one test, made on the CPU from one seed, and moved to the device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
    ) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.generator).to(self.device)


@pytest.fixture
def draw(device: torch.device) -> Draw:
    """Other random numbers in each run; SHMLLM_KERNEL_SEED repeats a run."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
    print(f"{SEED_VARIABLE}={seed}")
    return Draw(seed, device)


@pytest.fixture(autouse=True)
def _numpy_may_warn() -> Iterator[None]:
    """Suppress warnings of Triton's interpreter: it computes masked elements with numpy, too, and
    Triton 3.6 converts arrays to numbers in a way that numpy deprecates."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of NaN, or of -77, which a kernel has to overwrite."""
    return torch.full(shape, math.nan if dtype.is_floating_point else -77, dtype=dtype).to(device)


def assert_close(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol)
