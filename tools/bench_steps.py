#!/usr/bin/env python3
"""Measures the engine's steps in this process, without rings, front end and text.

    python tools/bench_steps.py --model MODEL [--requests 16] [--context 128] [--steps 200]

The tool computes prompts of random tokens and then times decode steps: median, p99, slowest, and
the slowest over the median. --cpu counts the CPU time of this process instead of wall time, which
other programs disturb less (with one thread; several threads wait by spinning). --profile prints
the time by Python function, and --kernels by kernel of the forward pass; each kernel then runs by
itself.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import json
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.core import EngineCore
from shmllm.frontend.model_files import resolve_model
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.cpu.runner import CpuRunner

PHASES = ("schedule", "prepare", "execute", "sample", "apply")


def make_core(
    model: str, requests: int, threads: int | None, **load: Any
) -> tuple[EngineCore, CpuRunner]:
    """An engine core for `requests` requests, and its runner."""
    config = EngineConfig(
        LoadConfig(str(resolve_model(model)), **load),
        CacheConfig(memory_bytes=2**30, enable_prefix_caching=False),
        SchedulerConfig(max(requests, 1)),
        num_threads=threads,
    )
    runner = CpuRunner(config)
    return EngineCore(config, runner), runner


def fill(core: EngineCore, requests: int, context: int, steps: int) -> tuple[int, float]:
    """Adds requests and computes their prompts; returns the number of steps and the seconds."""
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    for number in range(requests):
        prompt = [draw.randrange(core.info.vocab_size) for _ in range(context)]
        refusal = core.add(0, EngineCoreRequest(number, prompt, params))
        assert refusal is None, refusal
    began, count, caught_up = time.perf_counter(), 0, 0
    while caught_up < requests:
        for columns in core.step().values():
            caught_up += len(columns.cached_rows)
        count += 1
    return count, time.perf_counter() - began


def time_steps(
    core: EngineCore, steps: int, clock: Callable[[], int]
) -> tuple[list[float], dict[str, list[float]]]:
    """Times steps.

    Returns:
        The microseconds of each step by `clock`, and of each of its phases by wall time.
    """
    gc.collect()
    gc.freeze()
    times: list[float] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    for _ in range(steps):
        before = [getattr(core.timings, f"{name}_ns") for name in PHASES]
        began = clock()
        core.step()
        times.append((clock() - began) / 1e3)
        for name, ns in zip(PHASES, before, strict=True):
            phases[name].append((getattr(core.timings, f"{name}_ns") - ns) / 1e3)
    return times, phases


def time_kernels(core: EngineCore, runner: CpuRunner, steps: int) -> dict[str, float]:
    """By label, the median microseconds per step of the label's kernels."""
    each: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def observe(label: str) -> Iterator[None]:
        began = time.perf_counter_ns()
        yield
        spent[label] = spent.get(label, 0.0) + (time.perf_counter_ns() - began) / 1e3

    runner.observe(observe)
    for _ in range(steps):
        spent: dict[str, float] = {}
        core.step()
        for label, us in spent.items():
            each.setdefault(label, []).append(us)
    medians = {label: statistics.median(times) for label, times in each.items()}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def summary(times: list[float]) -> dict[str, float]:
    """Statistics of durations in microseconds."""
    ordered = sorted(times)
    median = statistics.median(ordered)
    return {
        "min_us": ordered[0],
        "median_us": median,
        "p99_us": ordered[int(len(ordered) * 0.99)],
        "max_us": ordered[-1],
        "max_over_median": ordered[-1] / median,
    }


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--model", required=True, help="Directory of a model.")
@click.option("--requests", default=1, show_default=True, help="Requests that decode at once.")
@click.option("--context", default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--steps", default=200, show_default=True, help="Timed decode steps.")
@click.option("--threads", type=int, help="Compute threads.  [default: the usable cores]")
@click.option("--dtype", default="auto", show_default=True, help="The engine's dtype.")
@click.option("--quantization", help="As the engine's option.  [default: none]")
@click.option("--activation-dtype", default="auto", show_default=True, help="Likewise.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="Likewise.")
@click.option("--cpu", is_flag=True, help="Measure CPU time instead of wall time.")
@click.option("--profile", is_flag=True, help="Print the functions that take the most time.")
@click.option("--kernels", is_flag=True, help="Time the kernels of the forward pass.")
def main(
    model: str,
    requests: int,
    context: int,
    steps: int,
    threads: int | None,
    dtype: Any,
    quantization: Any,
    activation_dtype: Any,
    kv_cache_dtype: Any,
    cpu: bool,
    profile: bool,
    kernels: bool,
) -> None:
    total = 2 * steps if kernels else steps
    length = context + total + 2
    core, runner = make_core(
        model, requests, threads, dtype=dtype, quantization=quantization,
        activation_dtype=activation_dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=length,
    )  # fmt: skip
    count, seconds = fill(core, requests, context, total)
    clock = time.process_time_ns if cpu else time.perf_counter_ns
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    times, phases = time_steps(core, steps, clock)
    profiler.disable()
    result = {
        "requests": requests,
        "context": context,
        "prefill": {"steps": count, "tokens_per_s": requests * context / seconds},
        "decode": summary(times),
        "tokens_per_s": requests * 1e6 / statistics.median(times),
        "phases_us": {
            name: {"min": min(each), "median": statistics.median(each)}
            for name, each in phases.items()
        },
    }
    if kernels:
        result["kernels_us"] = time_kernels(core, runner, steps)
    print(json.dumps(result, indent=1))
    if profile:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
