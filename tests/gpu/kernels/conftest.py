"""The Triton kernels compiled, on a GPU, with the tests that the interpreter runs too."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
