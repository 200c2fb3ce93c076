"""Tests that need a GPU: `pytest -m gpu`. Most of them also run interpreted, in other folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.kernel_helpers import draw

from shmllm_kernels.gpu.cache_keys import fix_cache_keys

__all__ = ["draw"]


@pytest.fixture(scope="session", autouse=True)
def _same_cache_keys() -> None:
    """Kernels that an engine or another run has compiled are found again."""
    fix_cache_keys()


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
