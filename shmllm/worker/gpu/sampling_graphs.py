"""Captured launches of the sampling that needs nothing but a temperature.

The host takes longer to launch two kernels with their thirty arguments than the device takes to
sample a few rows. All arguments are addresses that stay where they are, so a graph has them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shmllm.config.graphs import CudaGraphMode
from shmllm.worker.gpu.capture import CaptureReport, Captures, capture_graphs
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.piecewise_graph import PiecewiseGraph


class SamplingGraphs:
    """Graphs of sampling by their number of rows, which includes the padding of a step."""

    def __init__(self) -> None:
        self._graphs: dict[int, PiecewiseGraph] = {}
        self._address = 0

    def capture(
        self,
        device: Device,
        captures: Captures,
        warm_up: Callable[[], None],
        logits: Tensor,
        launch: Callable[[Tensor], None],
    ) -> CaptureReport:
        """Warm up, and capture a graph for each number of rows.

        Args:
            device: the device that captures.
            captures: graphs of a program, one for each number of rows.
            warm_up: launches all kernels once.
            logits: [most rows or more, vocab], where those graphs leave the logits.
            launch: launches the sampling of all rows of its argument.

        Raises:
            EngineStartError: a graph cannot be captured.
        """
        self._address = logits.data_ptr()

        def capture(_: CudaGraphMode, descriptor: BatchDescriptor) -> PiecewiseGraph:
            graph = PiecewiseGraph(device)
            graph.begin()
            launch(logits[: descriptor.num_samples])
            graph.end()
            self._graphs[descriptor.num_samples] = graph
            return graph

        return capture_graphs(device, captures, warm_up, capture, "the sampler")

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
