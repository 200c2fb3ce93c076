#!/usr/bin/env python3
"""Measures what it costs to admit requests into the last free KV blocks.

    python tools/bench_preemption.py -m MODEL --json FILE

Each load has more requests than its KV cache holds, with prompts and completions of random lengths.
The engines run each load in turn, with requests admitted when a first chunk fits
(`scheduler_reserve_full_isl=False`), and with the rooms of `--growth`, in tokens, behind each
request (`core/headroom.py`): compare the ratios. `computed` is the number of tokens that steps
computed, divided by the number that requests have.

`--cpu` counts the CPU time of the process instead of wall time, which other programs disturb less.
Use it with `--threads 1`, because several threads wait by spinning.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from shmllm import LLM, SamplingParams
from shmllm.cli.bench_output import describe_machine
from shmllm.core import headroom

Setting = int | str
SIMPLE = "first chunk"


class Load(NamedTuple):
    """
    Attributes:
        num_requests: how many requests there are.
        prompts, outputs: the shortest and longest prompt and completion, in tokens.
        num_blocks: the number of KV blocks, of 16 tokens.
    """

    num_requests: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    num_blocks: int


LOADS = (
    Load(48, (128, 384), (32, 256), 150),
    Load(48, (32, 64), (128, 384), 150),
    Load(24, (800, 1600), (16, 64), 300),
)


class Result(NamedTuple):
    """What a load took: tokens/s of completions, and see the module."""

    rate: float
    computed: float
    preemptions: int


class CountedSteps:
    """Counts the tokens that the steps of an engine compute.

    Args:
        llm: its engine is in this process.
    """

    def __init__(self, llm: LLM) -> None:
        self.num_tokens = 0
        scheduler = llm._client._core.scheduler  # type: ignore[attr-defined]
        schedule = scheduler.schedule

        def counted() -> Any:
            plan = schedule()
            self.num_tokens += plan.num_tokens
            return plan

        scheduler.schedule = counted


def measure(load: Load, setting: Setting, clock: Callable[[], float], **options: Any) -> Result:
    """Runs a load once on an engine of its own, after a short one that warms it up."""
    headroom.GROWTH_TOKENS = 0 if isinstance(setting, str) else setting
    rng = random.Random(7)
    lengths = [
        (rng.randint(*load.prompts), rng.randint(*load.outputs)) for _ in range(load.num_requests)
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in lengths
    ]
    with LLM(
        multiprocess=False,
        num_gpu_blocks_override=load.num_blocks + 1,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        scheduler_reserve_full_isl=setting != SIMPLE,
        **options,
    ) as llm:
        size = llm.facts.vocab_size
        prompts = [[rng.randrange(size) for _ in range(length)] for length, _ in lengths]
        llm.generate(prompts[0], params[0], use_tqdm=False)
        llm.reset_prefix_cache()
        steps = CountedSteps(llm)
        began = clock()
        llm.generate(prompts, params, use_tqdm=False)
        elapsed = clock() - began
        outputs = sum(count for _, count in lengths)
        needed = sum(length for length, _ in lengths) + outputs - load.num_requests
        preemptions = llm.get_metrics()["preemptions"]
        return Result(outputs / elapsed, steps.num_tokens / needed, preemptions)


@click.command(help=__doc__)
@click.option("-m", "--model", default="smollm2", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--growth", "growths", type=int, multiple=True, default=(0, 32))
@click.option("--rounds", default=2, show_default=True)
@click.option("--threads", default=0, help="Compute threads; 0: all cores.")
@click.option("--cpu", "by_cpu", is_flag=True, help="Count CPU time.")
@click.option("--json", "json_file", type=click.File("w"), help="Write the figures as JSON.")
def main(
    model: str,
    dtype: str,
    growths: tuple[int, ...],
    rounds: int,
    threads: int,
    by_cpu: bool,
    json_file: Any,
) -> None:
    clock = time.process_time if by_cpu else time.perf_counter
    options = {"model": model, "dtype": dtype, "num_threads": threads or None}
    rows = []
    for load in LOADS:
        settings: tuple[Setting, ...] = (SIMPLE, *growths)
        found: dict[Setting, list[Result]] = {setting: [] for setting in settings}
        for _ in range(rounds):
            for setting, results in found.items():
                results.append(measure(load, setting, clock, **options))
        base = statistics.median(each.rate for each in found[SIMPLE])
        for setting, results in found.items():
            rate = statistics.median(each.rate for each in results)
            row = {
                "load": load._asdict(),
                "growth": setting,
                "tokens_per_s": round(rate, 1),
                "ratio": round(rate / base, 3),
                "computed": round(results[-1].computed, 3),
                "preemptions": results[-1].preemptions,
            }
            rows.append(row)
            click.echo(" ".join(f"{name}={value}" for name, value in row.items()))
    if json_file:
        json.dump({"machine": describe_machine(), "rows": rows}, json_file, indent=1)


if __name__ == "__main__":
    main()
