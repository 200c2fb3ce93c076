"""Times work on a device: a GPU by its own events, the CPU by the clock.

Owns how to measure; must not know what. Work that is short is captured into a graph with a few
of its kind, so that what launching costs is not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

WARM_UPS = 3

Work = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Work, device: torch.device, rounds: int) -> float:
    """The median over `rounds` of what one call takes on the device, after a few to warm up."""
    if device.type != "cuda":
        return statistics.median(_host_times(work, rounds + 1)[1:])
    for _ in range(WARM_UPS):
        work()
    return statistics.median(_cuda_times(work, rounds))


def seconds_each(works: Sequence[Work], device: torch.device, rounds: int) -> float:
    """What a call takes on the device when all of these run one after the other, without the
    time to launch them: the median over `rounds`, over their number."""

    def all_of_them() -> None:
        for work in works:
            work()

    if device.type != "cuda":
        return seconds(all_of_them, device, rounds) / len(works)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        all_of_them()  # compiles and loads: neither may happen in a capture
    torch.cuda.current_stream(device).wait_stream(side)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    return seconds(graph.replay, device, rounds) / len(works)


def host_seconds_per_call(work: Work, device: torch.device, calls: int) -> tuple[float, float]:
    """What the host needs to launch `work`, and what a call takes until all of them are done."""
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
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(rounds)
    ]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _host_times(work: Work, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times
