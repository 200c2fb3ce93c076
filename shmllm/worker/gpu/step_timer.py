"""Measures how long a GPU needs for a step."""

from __future__ import annotations

from shmllm.worker.gpu.device import Device


class StepTimer:
    """Measures the device's time for a step. It can be reused after `wait_ns`.

    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        self._begun, self._ended = device.event(timing=True), device.event(timing=True)

    def begin(self) -> None:
        """Record the start: the step's work is launched after this call."""
        self._begun.record()

    def end(self) -> None:
        """Record the end: all of the step's work has been launched."""
        self._ended.record()

    def wait_ns(self) -> int:
        """Wait for the end, and return the device's time since the start, in ns. This includes
        gaps in which the device waited for a launch."""
        self._ended.wait()
        return round(self._ended.elapsed_ms(self._begun) * 1e6)
