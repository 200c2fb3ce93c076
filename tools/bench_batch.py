#!/usr/bin/env python3
"""What files cost: `shmllm generate -i -o` beside `LLM.generate` and `LLM.stream`.

    tools/bench_batch.py [--rows 2000] [--rounds 5] [--output-len 16] [--model DIRECTORY]

All run the same prompts on the same engine, in turns, so that they see the same machine.
With --no-compare the job runs once, and its own resident memory is watched: that of a
million rows should be that of a few.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from shmllm import LLM, SamplingParams
from shmllm.cli.batch import run_batch
from shmllm.cli.plan import look_at, make_plan

KV_CACHE_BYTES = 2**26
OPTIONS: dict[str, Any] = dict.fromkeys(
    ["as_json", "ordered", "resume", "token_ids", "openai_batch", "echo", "chat"], False
) | {"overwrite": True, "logprobs": None, "system": None}


class Session:
    """The engine that is there already."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @contextlib.contextmanager
    def open(self) -> Iterator[LLM]:
        yield self._llm

    def say_what_answers(self, llm: LLM) -> None:
        pass


def prompt(number: int) -> str:
    """Shorter than a KV block, so that nothing is cached for the second run."""
    return f"{number:,} is a number that"


def write_rows(path: Path, num_rows: int) -> None:
    with path.open("w") as out:
        for number in range(num_rows):
            out.write(json.dumps({"id": f"row-{number}", "prompt": prompt(number)}) + "\n")


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in status if x.startswith("VmHWM")) / 1024


def run_job(llm: LLM, source: Path, target: Path, sampling: dict[str, Any]) -> None:
    plan = make_plan(look_at(str(source)), [], OPTIONS | {"target": str(target)})
    code = run_batch(plan, sampling, Session(llm))  # type: ignore[arg-type]
    with target.open("rb") as stream:
        if code or sum(1 for _ in stream) != sum(1 for _ in source.open("rb")):
            raise RuntimeError(f"{target} lacks rows")


def measure(call: Callable[[], Any], num_rows: int) -> tuple[float, float]:
    """Rows a second, and microseconds a row of this process's CPU."""
    began, cpu_began = time.perf_counter(), time.process_time()
    call()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return num_rows / seconds, cpu_seconds / num_rows * 1e6


def compare(llm: LLM, source: Path, target: Path, sampling: dict[str, Any], rounds: int) -> None:
    num_rows = sum(1 for _ in source.open("rb"))
    prompts, params = [prompt(n) for n in range(num_rows)], SamplingParams(**sampling)
    ways: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
        "stream": lambda: deque(llm.stream(iter(prompts), params), 0),
        "job": lambda: run_job(llm, source, target, sampling),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name, call in ways.items():
            rate, cpu_us = measure(call, num_rows)
            if turn >= 0:
                found[name].append((rate, cpu_us))
                click.echo(f"{name} {rate:,.0f} rows/s, {cpu_us:,.0f} us a row of CPU")
    for name in ("generate", "stream"):
        pairs = list(zip(found["job"], found[name], strict=True))
        ratios = [job[0] / other[0] for job, other in pairs]
        more_us = statistics.median(job[1] - other[1] for job, other in pairs)
        click.echo(
            f"the job beside LLM.{name}: {statistics.median(ratios):.3f} times the rate "
            f"({min(ratios):.3f} to {max(ratios):.3f}), {more_us:+,.0f} us a row of CPU"
        )


@click.command()
@click.option("--rows", "num_rows", default=2000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output-len", default=16, show_default=True)
@click.option("--model", default="tiny", show_default=True)
@click.option("--load-format", default="auto", show_default=True)
@click.option("--compare/--no-compare", "is_compared", default=True)
def main(
    num_rows: int, rounds: int, output_len: int, model: str, load_format: Any, is_compared: bool
) -> int:
    """A batch job's rate and memory."""
    sampling = {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "in.jsonl", Path(directory) / "out.jsonl"
        write_rows(source, num_rows)
        with LLM(model, load_format=load_format, kv_cache_memory_bytes=KV_CACHE_BYTES) as llm:
            if is_compared:
                compare(llm, source, target, sampling, rounds)
            else:
                rate, _ = measure(lambda: run_job(llm, source, target, sampling), num_rows)
                click.echo(f"{num_rows:,} rows: {rate:,.0f} rows/s, {peak_mib():.1f} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(standalone_mode=True))
