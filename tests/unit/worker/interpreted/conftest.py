"""The tests of the GPU engine on the fake GPU, with the kernels in Triton's interpreter.

These tests run in processes of their own, which `test_gpu_interpreted.py` beside this folder
starts. The command `TRITON_INTERPRET=1 pytest tests/unit/worker/interpreted` runs them directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.variants import slow

if os.environ.get("TRITON_INTERPRET") == "1":
    from support import cooperative_interpreter, exact_products, fast_interpreter, wide_tiles
    from support.fake_gpu import FakeGpu, lazy
    from support.kernel_helpers import draw

    from shmllm.config.engine import EngineConfig
    from shmllm.worker import make_runner
    from shmllm.worker.fit_to_model import fit_to_model
    from shmllm.worker.gpu.runner import GpuRunner

    fast_interpreter.install()
    cooperative_interpreter.install()
    exact_products.install()
    wide_tiles.install()
    __all__ = ["draw"]

    @pytest.fixture
    def gpu_device() -> Iterator[FakeGpu]:
        """A fake GPU that executes nothing before the host waits."""
        with FakeGpu(lazy) as device:
            yield device

    @pytest.fixture
    def on_fake_gpu(gpu_device: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engines of this process run on the fake GPU."""

        def make(config: EngineConfig, *progress: Any) -> GpuRunner:
            return GpuRunner(fit_to_model(config), gpu_device, *progress)

        monkeypatch.setattr(make_runner, "make_runner", make)

    @pytest.fixture
    def launches_only(gpu_device: FakeGpu) -> None:
        """The fake GPU computes nothing: the test looks at what is launched, and with what."""
        gpu_device.computes = False

    @pytest.fixture
    def device(gpu_device: FakeGpu) -> torch.device:
        return gpu_device.torch_device

else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=[slow(torch.float32), torch.float16], ids=["f32", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes that the interpreter supports; its bfloat16 is broken. Most tests here
    have float32 without this fixture."""
    kind: torch.dtype = request.param
    return kind
