#!/usr/bin/env python3
"""Tokens a second of shmllm and of transformers' `generate`, on one model, interleaved.

    python tools/compare.py [--model DIR] [--repeats 3] [--json FILE]

Both compute in float32 with all cores, greedy, without stopping early, on the same random
prompts. The machine's noise hits both alike, so read the ratios.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, TextIO

import click
import torch
from transformers import AutoModelForCausalLM

from shmllm import LLM
from shmllm.cli.bench import describe_machine, measure
from shmllm.model_files import resolve_model

LOADS = ((1, 32, 128), (1, 128, 128), (16, 128, 128), (64, 128, 64), (64, 128, 128))


@torch.inference_mode()
def transformers_rate(model: Any, rng: random.Random, load: tuple[int, int, int]) -> float:
    """Generated tokens a second of one padded batch."""
    num_prompts, input_len, output_len = load
    vocabulary = range(16, model.config.vocab_size)
    ids = torch.tensor([rng.choices(vocabulary, k=input_len) for _ in range(num_prompts)])
    began = time.monotonic()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    )
    assert output.shape == (num_prompts, input_len + output_len)
    return num_prompts * output_len / (time.monotonic() - began)


def compare(llm: LLM, model: Any, load: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Medians of `repeats` rounds, each with one run of both, after a round to warm up."""
    rng = random.Random(0)
    ours, theirs = [], []
    for round_index in range(repeats + 1):
        rate = measure(llm, rng, *load)["output_tokens_per_s"]
        reference = transformers_rate(model, rng, load)
        if round_index:
            ours.append(rate)
            theirs.append(reference)
    num_prompts, input_len, output_len = load
    return {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "shmllm_tokens_per_s": statistics.median(ours),
        "transformers_tokens_per_s": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


@click.command(context_settings={"show_default": True})
@click.option("--model", default="tiny")
@click.option("--repeats", default=3)
@click.option("--json", "json_file", type=click.File("w"))
def main(model: str, repeats: int, json_file: TextIO | None) -> None:
    """Compare with transformers on this machine."""
    directory: Path = resolve_model(model)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    click.echo("requests  in  out   shmllm  transformers  ratio   (tokens/s)")
    with LLM(model, dtype="float32") as llm:
        for load in LOADS:
            result = compare(llm, reference, load, repeats)
            results.append(result)
            click.echo(
                f"{load[0]:>8} {load[1]:>3} {load[2]:>4} {result['shmllm_tokens_per_s']:>8,.0f} "
                f"{result['transformers_tokens_per_s']:>13,.0f} {result['ratio']:>6.2f}"
            )
    record = {"machine": describe_machine(), "model": model, "results": results}
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
