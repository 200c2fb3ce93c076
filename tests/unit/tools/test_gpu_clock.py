"""Timing on the CPU, and on a fake CUDA device that records the calls."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from gpu import clock

CUDA = torch.device("cuda")


class FakeCuda:
    """The part of `torch.cuda` that the clock uses. Its time advances when work runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.now_ms = 0.0
        for name in ("Event", "Stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"make_{name}"))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.make_Stream(device))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        self._captured: list[str] | None = None

    def work(self, name: str, ms: float) -> None:
        if self._captured is not None:
            self._captured.append(name)
            return
        self.calls.append(name)
        self.now_ms += ms

    def make_Stream(self, device: torch.device) -> Any:
        stream = type("Stream", (), {})()
        stream.wait_stream = lambda other: None
        return stream

    def make_Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = type("Event", (), {})()

        def record() -> None:
            event.at_ms = self.now_ms

        event.record = record
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event

    def make_CUDAGraph(self) -> Any:
        graph = type("Graph", (), {})()
        graph.replay = lambda: self.work(f"replay {graph.names}", 8.0)
        return graph

    @contextlib.contextmanager
    def graph(self, graph: Any):
        self._captured = []
        yield
        graph.names, self._captured = self._captured, None


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_works_run_once_then_one_graph_with_all_of_them_is_timed(cuda):
    works = [lambda: cuda.work("a", 100.0), lambda: cuda.work("b", 100.0)]
    assert clock.seconds_each(works, CUDA, rounds=5) == pytest.approx(8e-3 / 2)
    replays = ["replay ['a', 'b']"] * (clock.WARM_UPS + 5)
    assert cuda.calls == ["a", "b", *replays]


def test_cuda_events_time_work_on_a_gpu(cuda):
    times = itertools.chain([50.0] * clock.WARM_UPS, [1.0, 9.0, 2.0])
    took = clock.seconds(lambda: cuda.work("a", next(times)), CUDA, rounds=3)
    assert took == pytest.approx(2e-3)


def test_on_a_cpu_the_first_run_does_not_count(monkeypatch):
    moments = iter([0.0, 50.0, 100.0, 101.0, 200.0, 203.0, 300.0, 302.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    calls: list[int] = []
    works = [lambda: calls.append(1), lambda: calls.append(2)]
    assert clock.seconds_each(works, torch.device("cpu"), rounds=3) == 1.0
    assert calls == [1, 2] * 4


def test_launch_time_and_whole_time_are_separate(monkeypatch):
    moments = iter([10.0, 14.0, 18.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    found = clock.host_seconds_per_call(lambda: None, torch.device("cpu"), calls=4)
    assert found == (1.0, 2.0)
