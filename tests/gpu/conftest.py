"""Tests that need a GPU: `pytest -m gpu`. Most of them also run interpreted, in other folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.kernel_helpers import draw

__all__ = ["draw"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
