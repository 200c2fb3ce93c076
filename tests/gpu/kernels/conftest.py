"""The Triton kernels compiled, on a GPU, with the tests that the interpreter runs too."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import draw

__all__ = ["draw"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu/kernels" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
