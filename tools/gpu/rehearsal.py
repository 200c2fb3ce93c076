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
    from support import fast_interpreter

    fast_interpreter.install()


@contextmanager
def open_device(settings: Settings) -> Iterator[Device]:
    """Opens the device. In a rehearsal, engines in this process run on the fake GPU inside the
    context."""
    if not settings.rehearsal:
        yield CudaDevice()
        return
    from support.fake_gpu import FakeGpu

    from shmllm.worker import make_runner

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
