#!/usr/bin/env python3
"""Measures forward passes of one process and of several ranks, in turns.

    python tools/bench_parallel.py --model MODEL [--size 2] [--requests 1 --requests 16]

In each round every case decodes the same number of steps, and the time of a forward pass is its
smallest and its median: `1 thread`, the base; `N threads` of one process, each bound to a core; and
`N ranks` of one thread each. The machine should have nothing else to do. --neighbour keeps one core
busy with another process meanwhile. --begin measures nothing but how long after the beginning of a
step another rank sees it: the counterpart of sending it a plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

BOUND = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
if __name__ == "__main__" and not BOUND.items() <= os.environ.items():
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **BOUND})
USABLE = os.sched_getaffinity(0)

import torch  # noqa: E402, F401

os.sched_setaffinity(0, USABLE)  # the threads of a team stay bound, this one need not be

from shmllm.cli.bench_output import describe_machine  # noqa: E402
from shmllm.config.engine import (  # noqa: E402
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
)
from shmllm.config.load import LoadConfig  # noqa: E402
from shmllm.config.parallel import ParallelConfig  # noqa: E402
from shmllm.engine.core import EngineCore  # noqa: E402
from shmllm.frontend.model_files import resolve_model  # noqa: E402
from shmllm.parallel.memory import GroupMemory  # noqa: E402
from shmllm.params.request import EngineCoreRequest  # noqa: E402
from shmllm.params.sampling import SamplingParams  # noqa: E402
from shmllm.worker.group import Kind  # noqa: E402
from shmllm.worker.make_runner import make_runner  # noqa: E402
from shmllm_kernels.cpu.group import AwaitMore  # noqa: E402


def make_core(model: str, dtype: Any, requests: int, threads: int, ranks: int) -> EngineCore:
    """An engine core whose processes have `threads` threads in all."""
    load_format: Any = "dummy" if os.path.isdir(model) and not _has_weights(model) else "auto"
    config = EngineConfig(
        LoadConfig(str(resolve_model(model)), dtype=dtype, load_format=load_format),
        CacheConfig(memory_bytes=2**30, enable_prefix_caching=False),
        SchedulerConfig(requests),
        parallel=ParallelConfig(ranks),
        num_threads=threads,
        device="cpu",
    )
    return EngineCore(config, make_runner(config))


def _has_weights(directory: str) -> bool:
    return any(name.endswith((".safetensors", ".gguf")) for name in os.listdir(directory))


def forward_passes(core: EngineCore, requests: int, context: int, steps: int) -> list[float]:
    """The milliseconds of each forward pass while so many requests decode."""
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    for number in range(requests):
        prompt = [draw.randrange(core.info.vocab_size) for _ in range(context)]
        refusal = core.add(0, EngineCoreRequest(number, prompt, params))
        assert refusal is None, refusal
    found = []
    while core.has_unfinished:
        core.step()
        _, _, prepared_ns, executed_ns, *_ = core.timings.moments_ns
        if core.timings.num_tokens == requests:
            found.append((executed_ns - prepared_ns) / 1e6)
    return found


@contextlib.contextmanager
def neighbour(is_wanted: bool) -> Iterator[None]:
    """Another process that keeps one core busy."""
    if not is_wanted:
        yield
        return
    core = max(USABLE)
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def begin_latencies(count: int) -> list[float]:
    """The microseconds from the beginning of a step to another process that sees it."""
    memory = GroupMemory.create(2, is_pipeline=False)
    seen = memory.array("seen", 1)
    pid = os.fork()
    os.sched_setaffinity(0, {min(USABLE) if pid else max(USABLE)})
    if not pid:
        other = GroupMemory(os.dup(memory.fd), 1, 2, is_pipeline=False)
        other.look = AwaitMore(other.step.ctypes.data)
        waiter = other.waiter()
        while not other.has_ended:
            if other.next_step(waiter) is not None:
                seen[0] = time.perf_counter_ns()
                other.has_left()
        os._exit(0)
    found = []
    for _ in range(count):
        due = time.perf_counter_ns() + 500_000  # of work between two steps
        while (began := time.perf_counter_ns()) < due:
            pass
        memory.begin(Kind.STEP)
        memory.settle()
        found.append((seen[0] - began) / 1e3)
    memory.end()
    os.waitpid(pid, 0)
    memory.close()
    os.sched_setaffinity(0, USABLE)
    return found


@click.command(context_settings={"show_default": True})
@click.option("--model", default="tiny", help="Model directory or bundled name.")
@click.option("--dtype", default="float32", help="Dtype of the model.")
@click.option("--size", default=2, help="Number of threads, and of ranks.")
@click.option("--requests", multiple=True, type=int, default=(1, 16, 64), help="Requests at once.")
@click.option("--context", default=64, help="Tokens of each prompt.")
@click.option("--steps", default=24, help="Steps that each request decodes in a round.")
@click.option("--rounds", default=5, help="Rounds.")
@click.option("--neighbour", "is_disturbed", is_flag=True, help="Keep a core busy meanwhile.")
@click.option("--begin", is_flag=True, help="Measure the beginning of steps only.")
@click.option("--json", "json_file", type=click.File("w"), help="Also write the JSON to FILE.")
def main(
    model: str, dtype: str, size: int, requests: tuple[int, ...], context: int, steps: int,
    rounds: int, is_disturbed: bool, begin: bool, json_file: Any,
) -> None:  # fmt: skip
    """Compare ranks with threads."""
    if begin:
        found = sorted(begin_latencies(2000))
        quantiles = {f"p{part}": found[part * len(found) // 100] for part in (5, 50, 95)}
        click.echo(json.dumps({"machine": describe_machine(), "begin_us": quantiles}, indent=2))
        return
    sizes = {"1 thread": (1, 1), f"{size} threads": (size, 1), f"{size} ranks": (size, size)}
    cores = {name: make_core(model, dtype, max(requests), *each) for name, each in sizes.items()}
    info = cores["1 thread"].info
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "model": {"type": info.model_type, "parameters": info.num_parameters, "dtype": info.dtype},
        "context": context,
        "has_neighbour": is_disturbed,
        "forward_ms": {},
        "ratios": {},
    }
    try:
        with neighbour(is_disturbed):
            for count in requests:
                times: dict[str, list[list[float]]] = {name: [] for name in cores}
                for _ in range(rounds):
                    for name, core in cores.items():
                        times[name].append(forward_passes(core, count, context, steps))
                record["forward_ms"][count] = {
                    name: {
                        "min": min(map(min, found)),
                        "median": statistics.median(statistics.median(each) for each in found),
                    }
                    for name, found in times.items()
                }
                base = [statistics.median(each) for each in times["1 thread"]]
                record["ratios"][count] = {
                    name: statistics.median(
                        statistics.median(each) / first
                        for each, first in zip(found, base, strict=True)
                    )
                    for name, found in times.items()
                }
    finally:
        for core in cores.values():
            core.runner.close()
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
