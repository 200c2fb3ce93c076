"""Tests the Triton kernels on the CPU, under Triton's interpreter.

Triton compiles or interprets for the lifetime of a process, so these tests run in their own
processes: `test_triton.py` next to this folder starts them, or
`TRITON_INTERPRET=1 pytest tests/unit/kernels/triton`. Without that variable pytest collects nothing
here. The interpreter's bfloat16 is broken; tests/gpu/kernels tests that dtype on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.variants import slow

if os.environ.get("TRITON_INTERPRET") == "1":
    from support import cooperative_interpreter, exact_products, fast_interpreter
    from support.kernel_helpers import _numpy_may_warn, draw

    fast_interpreter.install()
    cooperative_interpreter.install()
    exact_products.install()
    __all__ = ["_numpy_may_warn", "draw"]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(params=[slow(torch.float32), torch.float16], ids=["f32", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
