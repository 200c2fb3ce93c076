"""A captured forward pass: CUDA graphs, and calls between them that are not captured."""

from __future__ import annotations

from collections.abc import Callable

from shmllm.worker.gpu.device import Device

Call = Callable[[], None]


class PiecewiseGraph:
    """CUDA graphs, and calls between them that each replay makes.

    A graph must pass results to the next one in memory that was allocated outside of the captures:
    the graphs share a memory pool, and the next graph may reuse what one graph allocated.

    Args:
        device: the device that captures.

    Attributes:
        num_graphs: the number of captured graphs.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parts: list[Call] = []
        self.num_graphs = 0

    def begin(self) -> None:
        """Record all launches from here on instead of executing them."""
        self._device.begin_capture()

    def call(self, call: Call) -> None:
        """Add a call that each replay makes after the work that was recorded so far. It is not
        called now."""
        self.end()
        self._parts.append(call)
        self.begin()

    def end(self) -> None:
        """Stop recording."""
        graph = self._device.end_capture()
        self._parts.append(graph.replay)  # a bound method: the graph lives as long as this
        self.num_graphs += 1

    def replay(self) -> None:
        """Launch the graphs and make the calls, in the order in which they were recorded."""
        for part in self._parts:
            part()
