#!/usr/bin/env python3
"""What reading and writing files costs a batch job: `shmllm generate` beside `LLM.generate`.

    tools/bench_batch.py [--rows 2000] [--rounds 5] [--output-len 16] [--model DIRECTORY]

Both run the same prompts on the same engine, in turns, so that both see the same machine.
The job's time begins when its input is opened and ends when its last record is written.
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
from collections.abc import Iterator
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


def run_job(llm: LLM, source: Path, target: Path, sampling: dict[str, Any]) -> float:
    began = time.perf_counter()
    plan = make_plan(look_at(str(source)), [], OPTIONS | {"target": str(target)})
    code = run_batch(plan, sampling, Session(llm))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    with target.open("rb") as stream:
        if code or sum(1 for _ in stream) != sum(1 for _ in source.open("rb")):
            raise RuntimeError(f"{target} lacks rows")
    return seconds


def compare(llm: LLM, source: Path, target: Path, sampling: dict[str, Any], rounds: int) -> None:
    num_rows = sum(1 for _ in source.open("rb"))
    prompts, params = [prompt(n) for n in range(num_rows)], SamplingParams(**sampling)
    ratios, own_us = [], []
    for turn in range(-1, rounds):
        began = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        middle = time.perf_counter(), time.process_time()
        run_job(llm, source, target, sampling)
        end = time.perf_counter(), time.process_time()
        if turn >= 0:
            (plain_s, plain_cpu_s), (job_s, job_cpu_s) = (
                [b - a for a, b in zip(*pair, strict=True)]
                for pair in ((began, middle), (middle, end))
            )
            ratios.append(plain_s / job_s)
            own_us.append(((job_cpu_s - plain_cpu_s) / num_rows) * 1e6)
            click.echo(f"job {num_rows / job_s:,.0f} rows/s, generate {num_rows / plain_s:,.0f}")
    click.echo(
        f"{num_rows:,} rows, {sampling['max_tokens']} tokens each: the job has "
        f"{statistics.median(ratios):.3f} times the rate of LLM.generate "
        f"({min(ratios):.3f} to {max(ratios):.3f}), and takes "
        f"{statistics.median(own_us):,.0f} us a row more of the front end's CPU"
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
                rate = num_rows / run_job(llm, source, target, sampling)
                click.echo(f"{num_rows:,} rows: {rate:,.0f} rows/s, {peak_mib():.1f} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(standalone_mode=True))
