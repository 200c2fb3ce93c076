#!/usr/bin/env python3
"""What deterministic=True costs: both engines in turns, and the ratio of their rates.

    python tools/bench_deterministic.py [--model DIR] [--dtype bfloat16] [--json FILE]

Each round measures every batch size on one engine and then on the other, so that the machine's
other work meets both; the ratios are medians over the rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any, TextIO

import click

from shmllm import LLM, SamplingParams
from shmllm.cli.bench_output import describe_machine
from shmllm.config import DTYPES

NUM_PROMPTS = (1, 16, 64)
FIRST_ORDINARY_TOKEN = 16


def measure(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
    """Generated tokens a second of one batch, and its median time to first token."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    began = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.monotonic() - began
    firsts = []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None
        firsts.append(metrics.first_token_time - metrics.arrival_time)
    return len(prompts) * output_len / seconds, statistics.median(firsts)


def compare(
    engines: tuple[LLM, LLM], size: int, lengths: tuple[int, int], repeats: int
) -> dict[str, Any]:
    """Medians of `repeats` rounds after one to warm up."""
    rng = random.Random(size)
    rates: list[tuple[float, float]] = []
    firsts: list[tuple[float, float]] = []
    vocabulary = range(FIRST_ORDINARY_TOKEN, engines[0].facts.vocab_size)
    for number in range(repeats + 1):
        prompts = [rng.choices(vocabulary, k=lengths[0]) for _ in range(size)]
        (rate, first), (other_rate, other_first) = (
            measure(llm, prompts, lengths[1]) for llm in engines
        )
        if number:
            rates.append((rate, other_rate))
            firsts.append((first, other_first))
    return {
        "num_prompts": size,
        "default_tokens_per_s": statistics.median(a for a, _ in rates),
        "deterministic_tokens_per_s": statistics.median(b for _, b in rates),
        "speed_ratio": statistics.median(b / a for a, b in rates),
        "ttft_ratio": statistics.median(b / a for a, b in firsts),
    }


@click.command(context_settings={"show_default": True})
@click.option("--model", default="tiny")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32")
@click.option("--input-len", default=128)
@click.option("--output-len", default=128)
@click.option("--repeats", default=5)
@click.option("--json", "json_file", type=click.File("w"))
def main(
    model: str, dtype: Any, input_len: int, output_len: int, repeats: int, json_file: TextIO | None
) -> None:
    """Tokens a second of a deterministic engine against a default one."""
    results = []
    click.echo(
        "requests  default  deterministic  speed  TTFT   (tokens/s; deterministic / default)"
    )
    with LLM(model, dtype=dtype) as plain, LLM(model, dtype=dtype, deterministic=True) as other:
        load_s = [llm.facts.load_seconds for llm in (plain, other)]
        for size in NUM_PROMPTS:
            result = compare((plain, other), size, (input_len, output_len), repeats)
            results.append(result)
            click.echo(
                f"{size:>8} {result['default_tokens_per_s']:>8,.0f} "
                f"{result['deterministic_tokens_per_s']:>14,.0f} "
                f"{result['speed_ratio']:>6.2f} {result['ttft_ratio']:>5.2f}"
            )
    click.echo(f"loading took {load_s[0]:.1f} and {load_s[1]:.1f} s")
    if json_file is not None:
        record = {"model": model, "dtype": dtype, "input_len": input_len, "output_len": output_len}
        record |= {"machine": describe_machine(), "load_s": load_s, "results": results}
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
