"""Captured launches of the sampling that needs nothing but a temperature.

The host takes longer to launch two kernels with their thirty arguments than the device takes to
sample a few rows. All arguments are addresses that stay where they are, so a graph has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from torch import Tensor

from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.device import Device, Graph


class SamplingGraphs:
    """Graphs of sampling by their number of rows, which includes the padding of a step."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}
        self._address = 0

    def capture(
        self,
        device: Device,
        counts: Set[int],
        logits: Tensor,
        launch: Callable[[Tensor], None],
    ) -> CaptureReport:
        """Capture a graph for each number of rows.

        Args:
            device: the device that captures.
            counts: the numbers of rows.
            logits: [most rows or more, vocab], where the graphs of a program leave them.
            launch: launches the sampling of all rows of its argument. Its kernels are compiled.
        """
        began, self._address = time.monotonic(), logits.data_ptr()
        largest_first = sorted(counts, reverse=True)
        if not largest_first:
            return CaptureReport(0.0, 0, 0)
        with device.capturing():
            free_bytes = device.free_bytes()
            for count in largest_first:
                device.begin_capture()
                launch(logits[:count])
                self._graphs[count] = device.end_capture()
        num_bytes = max(free_bytes - device.free_bytes(), 0)
        return CaptureReport(time.monotonic() - began, num_bytes, len(self._graphs))

    def replay(self, logits: Tensor, count: int) -> bool:
        """Sample the rows of a step.

        Args:
            logits: the step's logits, with any number of rows.
            count: the number of the step's rows, with padding.

        Returns:
            False: no graph samples these rows, and nothing was launched.
        """
        graph = self._graphs.get(count)
        if graph is None or logits.data_ptr() != self._address:
            return False
        graph.replay()
        return True
