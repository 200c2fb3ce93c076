"""What was recorded of a step, to be replayed."""

from __future__ import annotations

from collections.abc import Callable

from shmllm.worker.gpu.device import Device

Call = Callable[[], None]


class PiecewiseGraph:
    """Graphs, and between them calls that are made anew in every replay.

    What one piece leaves for the next has to lie in memory that nobody else is given: pieces
    share a pool, and what a graph allocated itself is free for the next one.

    Args:
        device: that captures.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parts: list[Call] = []
        self.num_graphs = 0

    def begin(self) -> None:
        """From here on what is launched is recorded instead."""
        self._device.begin_capture()

    def call(self, call: Call) -> None:
        """A replay makes this call here, behind what was recorded so far. Nothing is called
        now."""
        self.end()
        self._parts.append(call)
        self.begin()

    def end(self) -> None:
        """Nothing more is recorded."""
        graph = self._device.end_capture()
        self._parts.append(graph.replay)  # a bound method: the graph lives as long as this
        self.num_graphs += 1

    def replay(self) -> None:
        for part in self._parts:
            part()
