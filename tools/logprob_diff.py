#!/usr/bin/env python3
"""Measures the difference between the engine's and a trainer's log-probabilities of sampled tokens.

    python tools/logprob_diff.py --model DIR [--dtype bfloat16] [--temperature 0.7]

The engine completes pieces of Python's argparse.py and reports `processed_logprobs`. The trainer is
transformers on the same token ids: it computes logits in its dtype, converts them to float32,
divides them by the temperature and applies log_softmax. The tool prints the difference d (engine
minus trainer) per token: mean and largest magnitude, correlation, and the estimate
exp(-d) - 1 + d of KL(engine || trainer) that trainers monitor.

The exit code is 0 if the mean magnitude is within the bound (--bound; by default 1e-5 for float32
and 0.012 for other dtypes), else 1.
"""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from shmllm import LLM, SamplingParams
from shmllm.config.load import DTypeName
from shmllm.frontend.model_files import resolve_model

BOUNDS = {"float32": 1e-5}
OTHER_BOUND = 0.012
CHARACTERS_PER_TOKEN = 8

Sequence = tuple[list[int], list[int], list[float]]
"""Prompt, output, and the engine's log-probability of each output token."""


@dataclass(frozen=True)
class Differences:
    """Statistics of the difference d = engine minus trainer, per token.

    Attributes:
        num_tokens: number of compared tokens.
        mean: mean of |d|.
        largest: maximum of |d|.
        correlation: correlation of the engine's and the trainer's log-probabilities.
        kl_estimate: mean of exp(-d) - 1 + d.
    """

    num_tokens: int
    mean: float
    largest: float
    correlation: float
    kl_estimate: float


def sample(
    llm: LLM, num_prompts: int, prompt_len: int, output_len: int, temperature: float
) -> list[Sequence]:
    """Lets the engine complete prompts that are cut from a text."""
    tokenizer, text = llm.get_tokenizer(), inspect.getsource(argparse)
    places = [place * len(text) // (2 * num_prompts) for place in range(num_prompts)]
    pieces = [text[place : place + CHARACTERS_PER_TOKEN * prompt_len] for place in places]
    prompts: list[list[int]] = [tokenizer.encode(piece)[:prompt_len] for piece in pieces]
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=output_len, ignore_eos=True, logprobs=0
        )
        for seed in range(num_prompts)
    ]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        assert completion.logprobs is not None
        numbers = [e[t].logprob for e, t in zip(completion.logprobs, ids, strict=True)]
        found.append((output.prompt_token_ids, ids, numbers))
    return found


@torch.inference_mode()
def trainer_logprobs(
    model: Any, prompt: list[int], output: list[int], temperature: float
) -> list[float]:
    """The trainer's log-probabilities of the output's tokens."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    chosen: list[float] = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return chosen


def compare(sequences: list[Sequence], model: Any, temperature: float) -> Differences:
    """Compares the engine's log-probabilities with the trainer's."""
    engine = np.array([number for _, _, numbers in sequences for number in numbers])
    parts = [trainer_logprobs(model, prompt, ids, temperature) for prompt, ids, _ in sequences]
    trainer = np.array([number for part in parts for number in part])
    difference = engine - trainer
    return Differences(
        num_tokens=len(engine),
        mean=float(np.abs(difference).mean()),
        largest=float(np.abs(difference).max()),
        correlation=float(np.corrcoef(engine, trainer)[0, 1]),
        kl_estimate=float((np.exp(-difference) - 1 + difference).mean()),
    )


def measure(
    directory: Path,
    dtype: Any,
    temperature: float,
    trainer_dtypes: tuple[str, ...],
    size: tuple[int, int, int] = (16, 64, 64),
    **options: Any,
) -> dict[str, Differences]:
    """Compares the engine in `dtype` with trainers in several dtypes.

    Args:
        directory: the model.
        dtype: the engine's dtype.
        temperature: the sampling temperature.
        trainer_dtypes: the trainers' dtypes.
        size: number of prompts, tokens per prompt, tokens per output.
        options: further keyword arguments of `LLM`.

    Returns:
        The differences by trainer dtype.
    """
    mode: Any = "processed_logprobs"
    with LLM(str(directory), dtype=dtype, logprobs_mode=mode, **options) as llm:
        sequences = sample(llm, *size, temperature)
    found = {}
    for name in trainer_dtypes:
        trainer = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, name))
        trainer.eval()
        found[name] = compare(sequences, trainer, temperature)
    return found


@click.command(context_settings={"show_default": True})
@click.option("--model", default="tiny", help="Bundled name, directory or hub id.")
@click.option(
    "--dtype",
    type=click.Choice([d for d in get_args(DTypeName) if d != "auto"]),
    default="float32",
    help="The engine's dtype.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    help="Sampling temperature.",
)
@click.option("--num-prompts", default=16, help="Number of prompts.")
@click.option("--prompt-len", default=64, help="Tokens of each prompt.")
@click.option("--output-len", default=64, help="Tokens of each completion.")
@click.option(
    "--bound",
    type=float,
    help="Largest accepted mean difference from a trainer in the same dtype.  [default: 1e-5 for "
    "float32, else 0.012]",
)
@click.option("--json", "json_file", type=click.File("w"), help="Write JSON to FILE; - is stdout.")
def main(
    model: str,
    dtype: str,
    temperature: float,
    num_prompts: int,
    prompt_len: int,
    output_len: int,
    bound: float | None,
    json_file: TextIO | None,
) -> None:
    """Compare the engine's log-probabilities with a trainer's."""
    limit = BOUNDS.get(dtype, OTHER_BOUND) if bound is None else bound
    trainers = (dtype,) if dtype == "float32" else (dtype, "float32")
    found = measure(
        resolve_model(model),
        dtype,
        temperature,
        trainers,
        (num_prompts, prompt_len, output_len),
    )
    click.echo(
        "engine    trainer    tokens   mean |d|    max |d|  correlation  KL estimate", err=True
    )
    for name, each in found.items():
        click.echo(
            f"{dtype:<9} {name:<9} {each.num_tokens:>7,} {each.mean:>10.2e} {each.largest:>10.2e} "
            f"{each.correlation:>12.8f} {each.kl_estimate:>12.2e}",
            err=True,
        )
    is_within = found[dtype].mean <= limit
    if json_file is not None:
        record = {"dtype": dtype, "temperature": temperature}
        record |= {"bound": limit, "is_within": is_within}
        record["trainers"] = {name: asdict(each) for name, each in found.items()}
        json.dump(record, json_file, indent=2)
        json_file.write("\n")
    if not is_within:
        click.echo(f"the mean difference {found[dtype].mean:.2e} exceeds {limit:.2e}", err=True)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
