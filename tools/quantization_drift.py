#!/usr/bin/env python3
"""How far rounding moves a model's log-probabilities, and what it gives in speed.

    python tools/quantization_drift.py --model DIRECTORY [--prompts 16] [--output-len 64]

The float32 engine samples continuations of random prompts (temperature 0.7). Each arm scores these
tokens: float32, quantization="int8", and bfloat16 for comparison. Printed are the difference to
float32 (mean and largest magnitude, mean), how often the best token is the same, and the tokens
a second of one request.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import click

from shmllm import LLM, SamplingParams

ARMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float32", {"dtype": "float32"}),
    ("int8", {"dtype": "float32", "quantization": "int8"}),
    ("bfloat16", {"dtype": "bfloat16"}),
)
FIRST_ORDINARY_TOKEN = 16
PROMPT_LEN = 16
DECODED = 32

Prompts = list[dict[str, list[int]]]


def sample(llm: LLM, count: int, output_len: int) -> Prompts:
    """Random prompts with what the engine makes of them."""
    draw = random.Random(0)
    vocabulary = range(FIRST_ORDINARY_TOKEN, llm.facts.vocab_size)
    prompts = [{"prompt_token_ids": draw.choices(vocabulary, k=PROMPT_LEN)} for _ in range(count)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=output_len, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids]}
        for output in outputs
    ]


def score(llm: LLM, prompts: Prompts) -> tuple[list[float], list[int]]:
    """Log-probability of each sampled token, and which one was best."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    numbers, best = [], []
    for output in llm.generate(prompts, params, use_tqdm=False):
        entries = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        for entry, token in list(entries)[PROMPT_LEN:]:
            numbers.append(entry[token].logprob)
            best.append(max(entry, key=lambda each: entry[each].logprob))
    return numbers, best


def decode_speed(llm: LLM, prompt: dict[str, list[int]]) -> float:
    params = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return DECODED / (time.perf_counter() - began)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--model", default="tiny", show_default=True)
@click.option("--prompts", "count", default=16, show_default=True)
@click.option("--output-len", default=64, show_default=True)
def main(model: str, count: int, output_len: int) -> None:
    prompts: Prompts = []
    exact: tuple[list[float], list[int]] = [], []
    click.echo("          mean |d|   max |d|    mean d  same best  tokens/s")
    for name, options in ARMS:
        with LLM(model, max_model_len=PROMPT_LEN + output_len + DECODED + 1, **options) as llm:
            if not prompts:
                prompts = sample(llm, count, output_len)
                exact = score(llm, prompts)
            numbers, best = score(llm, prompts)
            speed = decode_speed(llm, prompts[0])
        moved = [one - other for one, other in zip(numbers, exact[0], strict=True)]
        sizes = [abs(each) for each in moved]
        same = sum(one == other for one, other in zip(best, exact[1], strict=True)) / len(best)
        click.echo(
            f"{name:8} {statistics.fmean(sizes):9.5f} {max(sizes):9.4f} "
            f"{statistics.fmean(moved):9.5f} {same:10.4f} {speed:9.1f}"
        )


if __name__ == "__main__":
    main()
