"""`shmllm bench`: how fast an engine is here."""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.bench_ipc import ipc
from shmllm.cli.options import engine_options, take_engine_options
from shmllm.version import __version__

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.request_state import RequestState

PERCENTILES = (50, 90, 99)
FIRST_ORDINARY_TOKEN = 16


@click.group()
def bench() -> None:
    """Measure an engine on this machine."""


bench.add_command(ipc)


@bench.command()
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 16, 64),
    show_default=True,
    help="Requests sent at once. Can be given several times.",
)
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--num-iters", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the random prompts.")
@click.option("--json", "json_file", type=click.File("w", encoding="utf-8", lazy=True))
@engine_options
def throughput(
    num_prompts: Sequence[int],
    input_len: int,
    output_len: int,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    json_file: Any,
    **options: Any,
) -> None:
    """Batches of random prompts, greedy, without stopping early.

    Prints generated tokens a second, time to first token (TTFT, from submission) and the
    time between a request's tokens (ITL) for each batch size: the iteration with the
    median rate. No prompt is ever sent twice, so the prefix cache helps nobody.
    """
    from shmllm.cli.session import Session

    engine = take_engine_options(options)
    rng = random.Random(seed)
    results = []
    session = Session(None, engine)
    with session.open() as llm:
        session.say_what_answers(llm)
        for size in num_prompts:
            for _ in range(num_iters_warmup):
                measure(llm, rng, size, input_len, output_len)
            runs = [measure(llm, rng, size, input_len, output_len) for _ in range(num_iters)]
            runs.sort(key=lambda run: run["output_tokens_per_s"])
            median = runs[len(runs) // 2]
            median["output_tokens_per_s_range"] = [
                runs[0]["output_tokens_per_s"],
                runs[-1]["output_tokens_per_s"],
            ]
            results.append(median)
            show(median, is_first=len(results) == 1)
        record = {
            "shmllm": __version__,
            "machine": describe_machine(),
            "engine": engine,
            "facts": {k: v for k, v in asdict(llm.facts).items() if k != "model_directory"},
            "input_len": input_len,
            "output_len": output_len,
            "num_iters": num_iters,
            "results": results,
        }
    if json_file is not None:
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


def measure(
    llm: LLM, rng: random.Random, num_prompts: int, input_len: int, output_len: int
) -> dict[str, Any]:
    """One batch: its rate, TTFT and ITL."""
    from shmllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    vocabulary = range(min(FIRST_ORDINARY_TOKEN, llm.facts.vocab_size - 1), llm.facts.vocab_size)
    prompts = [rng.choices(vocabulary, k=input_len) for _ in range(num_prompts)]
    requests = llm.prepare(prompts, params)
    finished: list[RequestState] = []
    began = time.monotonic()
    for changed in llm.serve(requests, time_tokens=True):
        finished += [state for state in changed if state.finish_reason is not None]
    seconds = time.monotonic() - began
    num_tokens = sum(len(state.token_ids) for state in finished)
    first = [(state.token_times or [began])[0] - state.metrics.arrival_time for state in finished]
    return {
        "num_prompts": num_prompts,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "total_tokens_per_s": (num_tokens + num_prompts * input_len) / seconds,
        "ttft_ms": percentiles(first),
        "itl_ms": percentiles([gap for state in finished for gap in gaps(state)]),
    }


def gaps(state: RequestState) -> list[float]:
    """Seconds between a request's tokens."""
    times = state.token_times or []
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds by percentile (nearest rank) and the largest."""
    ordered = sorted(seconds) or [0.0]
    ranks = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in PERCENTILES}
    return {name: 1000 * value for name, value in (ranks | {"max": ordered[-1]}).items()}


def show(result: dict[str, Any], is_first: bool) -> None:
    """One line of the table on stdout."""
    if is_first:
        names = [f"{what} {p}" for what in ("TTFT", "ITL") for p in ("p50", "p99", "max")]
        header = ["requests", "tokens/s", *names]
        click.echo("  ".join(f"{name:>9}" for name in header) + "   (ms)")
    times = [result[key][p] for key in ("ttft_ms", "itl_ms") for p in ("p50", "p99", "max")]
    cells = [f"{result['num_prompts']:>9}", f"{result['output_tokens_per_s']:>9,.0f}"]
    click.echo("  ".join(cells + [f"{value:>9.2f}" for value in times]))


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, without naming the machine."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
