"""The tests of the Triton kernels, compiled, on a GPU; the interpreter runs the same tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
