"""The runner for the device that was asked for, or that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.config.engine import EngineConfig
from shmllm.worker.cpu.runner import CpuRunner
from shmllm.worker.devices import choose_device, ignored_on_cpu
from shmllm.worker.gpu.device import CudaDevice
from shmllm.worker.loading import Progress

if TYPE_CHECKING:
    from shmllm.worker.gpu.runner import GpuRunner


def make_runner(
    config: EngineConfig, on_load: Progress | None = None, on_capture: Progress | None = None
) -> CpuRunner | GpuRunner:
    """
    Args:
        config: says what to run on.
        on_load: called with (bytes read, bytes in all) while weights are read.
        on_capture: called with (sizes captured, sizes in all) while a GPU's graphs are.

    Raises:
        EngineStartError: see `CpuRunner` and `GpuRunner`.
    """
    gpu, warning = choose_device(config.device)
    if gpu is not None:
        from shmllm.worker.gpu.runner import GpuRunner  # which brings Triton

        return GpuRunner(config, CudaDevice(gpu), on_load, on_capture)
    warnings = [] if warning is None else [warning]
    return CpuRunner(config, on_load, [*warnings, *ignored_on_cpu(config)])
