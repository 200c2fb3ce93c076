#!/usr/bin/env python
"""What tracing costs: while nobody traces, and while somebody does.

    python tools/bench_trace.py [--rounds 7] [--requests 16]

Prints ns for each seam off and on, then the speed of a traced engine against an untraced one,
both alive at once and taking turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shmllm import LLM, SamplingParams
from shmllm.core.observer import NULL_OBSERVER
from shmllm.engine.tracer import EngineTracer
from shmllm.ipc.channel import ClientChannel, CoreChannel
from shmllm.ipc.layout import SegmentKind
from shmllm.ipc.segment import Segment
from shmllm.ipc.wait import WaitPolicy
from shmllm.tracing.directory import VARIABLE, OwnedDirectory, Settings, SharedDirectory
from shmllm.tracing.layout import Direction
from shmllm.tracing.recorder import Recorder
from shmllm.tracing.rings import RingTracer

REPEATS = 7
NUM_CALLS = 2000


def ns_per_call(function: Callable[[], Any]) -> float:
    """The fastest of several repetitions: what it costs undisturbed."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter_ns()
        for _ in range(NUM_CALLS):
            function()
        best = min(best, (time.perf_counter_ns() - began) / NUM_CALLS)
    return best


def a_step(observer: Any, rows: int) -> Callable[[], None]:
    """What a step of decodes calls."""
    request = SimpleNamespace(num_prompt_tokens=10)
    plan = SimpleNamespace(
        step=1, num_tokens=rows, requests=[request] * rows, starts=[20] * rows, counts=[1] * rows
    )

    def step() -> None:
        observer.drained(1, 2)
        observer.stepped(plan, (1, 2, 3, 4, 5, 6))
        observer.published(6)

    return step


def a_record(sender: ClientChannel, receiver: CoreChannel) -> Callable[[], None]:
    """A record on its way through a ring: both ends."""
    payload = bytes(100)

    def handle(kind: int, record: memoryview) -> None:
        pass

    def cross() -> None:
        sender.try_send(5, payload)
        receiver.drain(handle)

    return cross


def measure_seams(recorder: Recorder) -> None:
    core = SimpleNamespace(scheduler=SimpleNamespace(num_running=1, num_waiting=0))
    core.num_used_blocks = 1
    nothing = ns_per_call(lambda: None)
    print(f"a step, off: {ns_per_call(a_step(NULL_OBSERVER, 64)) - nothing:,.0f} ns")
    for rows in (1, 16, 64, 256):
        spent = ns_per_call(a_step(EngineTracer(recorder, core), rows)) - nothing  # type: ignore[arg-type]
        print(f"a step of {rows} rows, on: {spent:,.0f} ns")
    with Segment.create(SegmentKind.CONTROL) as control, Segment.create(SegmentKind.CLIENT) as own:
        front = ClientChannel(control, own, WaitPolicy.named("idle"))
        engine = CoreChannel(control, own)
        off = ns_per_call(a_record(front, engine))
        front.watch(RingTracer(recorder, 1, Direction.REQUESTS))
        engine.watch(RingTracer(recorder, 1, Direction.OUTPUTS))
        on = ns_per_call(a_record(front, engine))
        print(f"a record and both its ends: off {off:,.0f}, on {on:,.0f} ns")
        front.close()
        engine.close()


def measure_speed(directory: Path, num_rounds: int, num_requests: int) -> None:
    """Untraced and traced engines in turns."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**28}
    plain = LLM("tiny", **options)
    os.environ[VARIABLE] = str(directory)
    traced = LLM("tiny", **options)
    del os.environ[VARIABLE]
    times: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(num_rounds + 1):
        prompts = [f"x{number}_{i} = " for i in range(num_requests)]
        for name, llm in (("off", plain), ("on", traced)):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times[name].append(time.perf_counter() - began)
    off, on = (statistics.median(each[1:]) for each in times.values())
    ratios = [b / a for a, b in zip(times["off"][1:], times["on"][1:], strict=True)]
    print(
        f"{num_requests} requests of 64 tokens: off {off * 1e3:.0f} ms, on {on * 1e3:.0f} ms; "
        f"pairs' ratios {min(ratios):.3f} to {max(ratios):.3f}, median "
        f"{statistics.median(ratios):.3f}"
    )
    plain.close()
    traced.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=16)
    arguments = parser.parse_args()
    directory = OwnedDirectory(Settings(), Path(tempfile.gettempdir()))
    recorder = Recorder(SharedDirectory(directory.path), {"role": "benchmark"})
    try:
        measure_seams(recorder)
        measure_speed(directory.path, arguments.rounds, arguments.requests)
    finally:
        recorder.end()
        directory.close()


if __name__ == "__main__":
    main()
