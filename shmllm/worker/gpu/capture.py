"""The capture of a program's CUDA graphs, and what it costs.

This module must not know what a graph contains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shmllm.config.graphs import CudaGraphMode
from shmllm.errors import EngineStartError
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.piecewise_graph import PiecewiseGraph
from shmllm.worker.loading import Progress

Captures = Sequence[tuple[CudaGraphMode, BatchDescriptor]]
"""The modes and sizes of graphs, in the order of their capture."""


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The cost of capturing the graphs.

    Attributes:
        seconds: the time, with the warm-up.
        num_bytes: the device memory that the graphs take.
        num_graphs: the number of CUDA graphs; a piecewise graph counts once for each piece.
    """

    seconds: float
    num_bytes: int
    num_graphs: int

    def __add__(self, other: CaptureReport) -> CaptureReport:
        return CaptureReport(
            self.seconds + other.seconds,
            self.num_bytes + other.num_bytes,
            self.num_graphs + other.num_graphs,
        )

    def __str__(self) -> str:
        mib = self.num_bytes / 2**20
        graphs = "graph" if self.num_graphs == 1 else "graphs"
        return f"{self.num_graphs:,} {graphs}, {self.seconds:.1f} s, {mib:,.0f} MiB"


def capture_graphs(
    device: Device,
    captures: Captures,
    warm_up: Callable[[], None],
    capture: Callable[[CudaGraphMode, BatchDescriptor], PiecewiseGraph],
    owner: str,
    on_progress: Progress | None = None,
) -> CaptureReport:
    """Warm up, and capture graphs.

    Args:
        device: the device that captures.
        captures: the graphs.
        warm_up: runs what is captured, so that its kernels are compiled and loaded.
        capture: captures one graph, and keeps it.
        owner: whose graphs these are, for messages.
        on_progress: called with (sizes captured, sizes in all), if there are any.

    Raises:
        EngineStartError: a graph cannot be captured, or there is not enough memory.
    """
    began = time.monotonic()
    num_graphs = 0

    def report(done: int) -> None:
        if on_progress is not None and captures:
            on_progress(done, len(captures))

    with device.capturing():
        report(0)
        warm_up()  # on the capturing stream: libraries have a workspace for each stream
        device.synchronize()
        free_bytes = device.free_bytes()
        for done, (mode, descriptor) in enumerate(captures, 1):
            try:
                num_graphs += capture(mode, descriptor).num_graphs
            except (RuntimeError, MemoryError) as problem:
                raise EngineStartError(
                    f"{owner}'s {mode.name} graph of {descriptor.num_tokens} tokens cannot be "
                    f"captured: {problem}; smaller cudagraph_capture_sizes need less memory, and "
                    "enforce_eager=True none"
                ) from problem
            report(done)
    num_bytes = max(free_bytes - device.free_bytes(), 0)
    return CaptureReport(time.monotonic() - began, num_bytes, num_graphs)
