#!/usr/bin/env python3
"""Measures the time and the freed memory of sleep and wake-up, and the time of a restart.

    tools/make_model.py --size 135m models/135m
    tools/bench_sleep.py models/135m [--load-format dummy] [--quantization int8] [--rounds 5]
                         [--json FILE]

Each round fills the KV cache with the same prompts and then sleeps and wakes up at one level. After
level 2 this process writes the weights, like a trainer. Times are medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shmllm import LLM, SamplingParams, SleepReport
from shmllm.cli.bench_output import describe_machine
from shmllm.outputs.sleep_report import MIB

PROMPTS: list[Any] = [
    {"prompt_token_ids": [1 + (7 * i + j) % 3_000 for j in range(256)]} for i in range(16)
]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Calls `work`; returns the seconds that it took, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def one_round(llm: LLM, level: int, weights: list[tuple[str, Any]]) -> dict[str, Any]:
    """Sleeps at `level`, wakes up, and generates; returns seconds and the sleep's report."""
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    asleep_s, report = timed(lambda: llm.sleep(level))
    wake_s, is_awake = timed(lambda: llm.wake_up(["weights"] if level == 2 else None))
    write_s = 0.0
    if not is_awake and level == 2:
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        write_s, _ = timed(lambda: model.load_weights(weights))
        more_s, is_awake = timed(llm.wake_up)
        wake_s += more_s
    assert is_awake
    first_s, _ = timed(lambda: llm.generate(PROMPTS[0], PARAMS, use_tqdm=False))
    return {"sleep": asleep_s, "wake": wake_s, "write": write_s, "first": first_s, "report": report}


def summary(level: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one level: median times in milliseconds, and memory in MiB by owner."""
    names = ("sleep", "wake", "write", "first")
    found: dict[str, Any] = {
        f"{name}_ms": 1e3 * statistics.median(each[name] for each in rounds) for name in names
    }
    report: SleepReport = rounds[-1]["report"]
    found |= {"level": level, "freed_mib": report.freed_bytes / MIB}
    return found | {
        "before_mib": {owner: size / MIB for owner, size in report.before.items()},
        "after_mib": {owner: size / MIB for owner, size in report.after.items()},
    }


@click.command(context_settings={"show_default": True})
@click.argument("model")
@click.option("--load-format", default="auto", help="dummy makes random weights.")
@click.option("--quantization", type=click.Choice(["int8"]), help="Round the weights to 8 bits.")
@click.option("--rounds", default=5, help="Repetitions at each level.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write all figures as JSON."
)
def main(
    model: str, load_format: Any, quantization: Any, rounds: int, json_path: Path | None
) -> None:
    """Measure sleep and wake-up of an engine for MODEL."""
    options = {"load_format": load_format, "quantization": quantization}
    start_s, llm = timed(lambda: LLM(model, **options, kv_cache_memory_bytes=2**29))
    with llm:
        names = llm.collective_rpc("list_weights")[0]
        weights = [(name, llm.collective_rpc("get_weight", args=(name,))[0]) for name in names]
        for level in (0, 1, 2):  # the first round allocates memory that later rounds reuse
            one_round(llm, level, weights)
        found = [
            summary(level, [one_round(llm, level, weights) for _ in range(rounds)])
            for level in (0, 1, 2)
        ]
    restart_s, llm = timed(lambda: LLM(model, **options, kv_cache_memory_bytes=2**29))
    llm.close()
    click.echo(f"start {start_s:.2f} s, again {restart_s:.2f} s")
    click.echo("level  sleep ms  wake ms  write ms  first ms  freed MiB")
    for row in found:
        values = [row[f"{name}_ms"] for name in ("sleep", "wake", "write", "first")]
        cells = "".join(f"{value:10.1f}" for value in values)
        click.echo(f"{row['level']:<5}{cells}{row['freed_mib']:11.1f}")
        click.echo(f"       before {_mib(row['before_mib'])}; after {_mib(row['after_mib'])}")
    if json_path is not None:
        record = {"machine": describe_machine(), "model": model, "restart_s": restart_s}
        json_path.write_text(json.dumps(record | {"levels": found}, indent=2) + "\n")


def _mib(owners: dict[str, float]) -> str:
    return ", ".join(f"{owner} {size:.0f}" for owner, size in owners.items())


if __name__ == "__main__":
    main()
