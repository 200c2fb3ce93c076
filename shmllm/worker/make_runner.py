"""The runner for the device that was asked for, or that there is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shmllm.config import EngineConfig
from shmllm.worker.devices import choose_device, ignored_on_cpu
from shmllm.worker.gpu.device import CudaDevice
from shmllm.worker.loading import Progress
from shmllm.worker.runner import ModelRunner


def make_runner(config: EngineConfig, on_progress: Progress | None = None) -> Any:
    """See `ModelRunner` for arguments and errors."""
    gpu, warning = choose_device(config.device)
    if gpu is not None:
        runner = import_module("shmllm.worker.gpu.runner")
        return runner.GpuRunner(config, CudaDevice(gpu), on_progress)
    warnings = [] if warning is None else [warning]
    return ModelRunner(config, on_progress, [*warnings, *ignored_on_cpu(config)])
