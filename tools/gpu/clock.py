"""Measures the time of work on a device: with CUDA events on a GPU, with a clock on the CPU.

Short work is captured in a graph, several calls together, so that the time of launching is not
included. This module must not know what it measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM_UPS = 3
_cuda: Any = torch.cuda  # partly without annotations

Work = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Waits until the device has completed all its work."""
    if device.type == "cuda":
        _cuda.synchronize(device)


def seconds(work: Work, device: torch.device, rounds: int) -> float:
    """Returns the median time of one call on the device over `rounds`, after warm-up calls."""
    if device.type != "cuda":
        return statistics.median(_host_times(work, rounds + 1)[1:])
    for _ in range(WARM_UPS):
        work()
    return statistics.median(_cuda_times(work, rounds))


def seconds_each(works: Sequence[Work], device: torch.device, rounds: int) -> float:
    """Returns the mean time of a call on the device when all `works` run one after the other.

    The time of launching is not included on a GPU. It is the median over `rounds` of the time of
    all calls, divided by their number.
    """

    def all_of_them() -> None:
        for work in works:
            work()

    if device.type != "cuda":
        return seconds(all_of_them, device, rounds) / len(works)
    side = _cuda.Stream(device)
    side.wait_stream(_cuda.current_stream(device))
    with _cuda.stream(side):
        all_of_them()  # compiles and loads the kernels, which is not allowed during a capture
    _cuda.current_stream(device).wait_stream(side)
    synchronize(device)
    graph = _cuda.CUDAGraph()
    with _cuda.graph(graph):
        all_of_them()
    return seconds(graph.replay, device, rounds) / len(works)


def host_seconds_per_call(work: Work, device: torch.device, calls: int) -> tuple[float, float]:
    """Returns two mean times per call: the host's time to launch `work`, and the whole time until
    all calls are complete."""
    for _ in range(WARM_UPS):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        work()
    launched = time.perf_counter()
    synchronize(device)
    return (launched - began) / calls, (time.perf_counter() - began) / calls


def _cuda_times(work: Work, rounds: int) -> list[float]:
    events = [
        (_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    _cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _host_times(work: Work, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times
