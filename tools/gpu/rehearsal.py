"""What a rehearsal has instead of a GPU: the tests' fake GPU, and a faster interpreter of kernels.

The fake GPU interprets the kernels and checks asynchronous work; see tests/support/fake_gpu.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.settings import Settings
from shmllm.worker.gpu.device import CudaDevice, Device

TESTS = Path(__file__).resolve().parents[2] / "tests"


def interpret() -> None:
    """Prepares this process for a part whose kernels are interpreted."""
    sys.path.insert(0, str(TESTS))
    from support import cooperative_interpreter, fast_interpreter

    fast_interpreter.install()
    cooperative_interpreter.install()


@contextmanager
def open_device(settings: Settings, index: int = 0) -> Iterator[Device]:
    """Opens the device of an index. In a rehearsal, engines in this process run on the fake GPU
    inside the context."""
    if not settings.rehearsal:
        yield CudaDevice(index)
        return
    from support.fake_gpu import FakeGpu
    from support.fake_gpu_sharing import FakeGpuSharing

    from shmllm.parallel.gpu_memory import GpuGroupMemory
    from shmllm.worker import make_runner

    GpuGroupMemory.make_sharing = FakeGpuSharing
    original = make_runner.make_runner
    with FakeGpu() as device:
        make_runner.make_runner = lambda config, *progress: _runner(config, device, *progress)
        try:
            yield device
        finally:
            make_runner.make_runner = original


def _runner(config: Any, device: Device, *progress: Any) -> Any:
    from shmllm.worker.gpu.runner import GpuRunner

    return GpuRunner(config, device, *progress)
