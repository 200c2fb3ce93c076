"""What the tests of the Triton kernels share, interpreted or on a GPU: inputs and tolerances.

A test draws fresh numbers from the fixture `draw`, whose seed it prints, and poisons what a
kernel is to write before it runs. `dtype` and `device` are fixtures of the folder.
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
    """Random tensors of one test, made on the CPU from one seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0):
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)

    def uniform(self, *shape: int):
        return torch.rand(shape, generator=self.generator).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64):
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def permutation(self, size: int):
        return torch.randperm(size, generator=self.generator).to(self.device)


@pytest.fixture
def draw(device: torch.device) -> Draw:
    """Fresh numbers in each run; SHMLLM_KERNEL_SEED repeats one."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
    print(f"{SEED_VARIABLE}={seed}")
    return Draw(seed, device)


@pytest.fixture(autouse=True)
def _numpy_may_warn() -> Iterator[None]:
    """The interpreter computes with numpy, and masked elements too. That of Triton 3.6 makes
    numbers of arrays in a way that numpy is to drop."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a kernel has to overwrite: NaN, or an impossible number."""
    return torch.full(shape, math.nan if dtype.is_floating_point else -77, dtype=dtype).to(device)


def assert_close(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol)
