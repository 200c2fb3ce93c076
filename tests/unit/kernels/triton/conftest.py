"""The Triton kernels under Triton's interpreter, on the CPU.

Triton compiles or interprets for the whole life of a process, so these tests run in one of
their own: `test_triton.py` beside this folder starts it, or
`TRITON_INTERPRET=1 pytest tests/unit/kernels/triton`. Elsewhere nothing is collected here.
The interpreter's bfloat16 is broken: those numbers are for a GPU, in tests/gpu/kernels.
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from support.kernel_helpers import _numpy_may_warn, draw

    __all__ = ["_numpy_may_warn", "draw"]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.float16], ids=["f32", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
