"""How long the device is busy with a step."""

from __future__ import annotations

from shmllm.worker.gpu.device import Device


class StepTimer:
    """Two points in the device's work. May be used again when it was waited for.

    Args:
        device: whose time it is.
    """

    def __init__(self, device: Device) -> None:
        self._begun, self._ended = device.event(timing=True), device.event(timing=True)

    def begin(self) -> None:
        """What is launched from here on is the step's."""
        self._begun.record()

    def end(self) -> None:
        """Up to here."""
        self._ended.record()

    def wait_ns(self) -> int:
        """Wait for the end. Returns the device's time since the beginning, in ns; gaps in which
        it waited for a launch count."""
        self._ended.wait()
        return round(self._ended.elapsed_ms(self._begun) * 1e6)
