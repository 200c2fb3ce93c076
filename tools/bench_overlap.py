#!/usr/bin/env python3
"""What it brings to plan a step while the one before runs: `async_scheduling` on against off.

    tools/bench_overlap.py --model DIRECTORY [--threads 1 --threads 2] [--batch 1 --batch 16]
                           [--device auto] [--rounds 7] [--json FILE]

Both engines are alive at once and take turns, each first in every other round, so that the rest
of the machine disturbs both. Of a batch: tokens a second at the front end, and the period of decode
steps, from one's begin to the next one's, in microseconds. Ratios are medians of those of the
rounds: tokens a second on over off, and period off over on, so that above 1 it helps.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, TextIO

import click
import numpy as np

from shmllm import LLM, SamplingParams
from shmllm.bench.generation import Measured, RandomPrompts, run_batch
from shmllm.bench.report import number, table
from shmllm.bench.steps import StepFollower, StepTable, is_decode
from shmllm.cli.bench import describe_machine
from shmllm.ipc.stats import StepField
from shmllm.monitor.find import choose, find_engines
from shmllm.monitor.sample import Watch

ARMS = {"off": False, "on": True}
Rounds = dict[str, list[float]]


def period_us(steps: StepTable) -> float:
    """From the begin of a decode step to that of the next step, median."""
    periods = np.diff(steps[:, StepField.BEGAN_NS])[is_decode(steps)[:-1]]
    return float(np.median(periods)) / 1e3 if len(periods) else float("nan")


class Arm:
    """An engine, and what its steps are read from."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.llm = stack.enter_context(LLM(**options))
        engine = choose(find_engines(), str(self.llm.engine_pid))
        assert engine is not None
        watch = stack.enter_context(closing(Watch(engine)))
        self._follower = StepFollower(watch.step_log())

    def run(self, batch: int, input_len: int, params: SamplingParams) -> tuple[float, float]:
        """Tokens a second, and the period of decode steps."""
        measured = Measured()
        prompts = RandomPrompts(random.Random(), input_len).batch(self.llm, batch)
        run_batch(self.llm, self._follower, prompts, params, measured)
        return measured.output_tokens[0] / measured.seconds[0], period_us(measured.all_steps())


def summary(speeds: Rounds, periods: Rounds) -> dict[str, Any]:
    return {
        "tokens_per_s": {arm: statistics.median(each) for arm, each in speeds.items()},
        "period_us": {arm: statistics.median(each) for arm, each in periods.items()},
        "speed_ratio": ratio(speeds["on"], speeds["off"]),
        "period_ratio": ratio(periods["off"], periods["on"]),
        "rounds": {"tokens_per_s": speeds, "period_us": periods},
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Of the rounds: lower quartile, median, upper quartile."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    low, median, high = np.quantile(each, (0.25, 0.5, 0.75)).tolist()
    return {"low": low, "median": median, "high": high}


def measure(
    arms: dict[str, Arm], batch: int, rounds: int, input_len: int, output_len: int
) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    speeds: Rounds = {arm: [] for arm in ARMS}
    periods: Rounds = {arm: [] for arm in ARMS}
    for turn in range(-1, rounds):
        for arm in list(ARMS)[:: 1 if turn % 2 else -1]:
            speed, period = arms[arm].run(batch, input_len, params)
            if turn >= 0:
                speeds[arm].append(speed)
                periods[arm].append(period)
    return summary(speeds, periods)


def report(results: dict[str, dict[str, Any]]) -> str:
    def arm(key: str, name: str) -> Callable[[str], str]:
        return lambda case: number(results[case][key][name])

    def spread(key: str) -> Callable[[str], str]:
        def cell(case: str) -> str:
            found = results[case][key]
            return f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"

        return cell

    columns = {
        "tokens/s off": arm("tokens_per_s", "off"),
        "on": arm("tokens_per_s", "on"),
        "on / off": spread("speed_ratio"),
        "period off": arm("period_us", "off"),
        "on ": arm("period_us", "on"),
        "off / on": spread("period_ratio"),
    }
    return table("threads, batch", list(results), columns)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--model", default="tiny", show_default=True)
@click.option("--load-format", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--threads", multiple=True, type=int, help="Compute threads; several are compared.")
@click.option("--batch", multiple=True, type=int, default=(1, 16, 64), show_default=True)
@click.option("--rounds", default=7, show_default=True, help="After one to warm up.")
@click.option("--input-len", default=32, show_default=True)
@click.option("--output-len", default=128, show_default=True)
@click.option("--json", "json_file", type=click.File("w"))
def main(
    threads: tuple[int, ...],
    batch: tuple[int, ...],
    rounds: int,
    input_len: int,
    output_len: int,
    json_file: TextIO | None,
    **engine: Any,
) -> None:
    """Measure."""
    results: dict[str, dict[str, Any]] = {}
    options = {"kv_cache_memory_bytes": 2**29, "max_num_seqs": max(batch)} | engine
    for count in threads or (None,):
        with ExitStack() as stack:
            arms = {
                name: Arm(stack, async_scheduling=on, num_threads=count, **options)
                for name, on in ARMS.items()
            }
            where = arms["on"].llm.facts.processor
            for size in batch:
                case = f"{where}, {size}"
                results[case] = measure(arms, size, rounds, input_len, output_len)
                click.echo(f"{case}: {results[case]['speed_ratio']['median']:.3f}", err=True)
    click.echo(report(results))
    if json_file is not None:
        about = {"machine": describe_machine(), "engine": engine, "rounds": rounds}
        lengths = {"input_len": input_len, "output_len": output_len}
        json.dump(about | lengths | {"results": results}, json_file, indent=1)


if __name__ == "__main__":
    main()
