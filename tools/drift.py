#!/usr/bin/env python3
"""Measures what the dtypes of weights and activations change, against float32.

    python tools/drift.py [--model smollm2] [--tokens 8192]

Each setting scores the same text, pieces of Python's argparse.py. The table has, over all tokens:
the mean negative log-likelihood, the mean and the largest difference of a token's log-probability
from float32's, and how often the likeliest token is the same. "As packed" is for a file of packed
weights, such as the default's. Settings that are not possible here are left out.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import click
import numpy as np

from shmllm import LLM, EngineStartError, SamplingParams, TokensPrompt

PIECE = 512
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16, activations float32": {"dtype": "bfloat16", "activation_dtype": "float32"},
    "bfloat16, activations bfloat16": {"dtype": "bfloat16", "activation_dtype": "bfloat16"},
    "int8, activations float32": {"quantization": "int8", "activation_dtype": "float32"},
    "int8, activations bfloat16": {"quantization": "int8", "activation_dtype": "bfloat16"},
    "int8, activations int16": {"quantization": "int8", "activation_dtype": "int16"},
    "int8, activations int8": {"quantization": "int8", "activation_dtype": "int8"},
    "as packed, activations bfloat16": {"activation_dtype": "bfloat16"},
    "as packed, activations int16": {"activation_dtype": "int16"},
    "as packed, activations int8": {"activation_dtype": "int8"},
    "float32, keys and values bfloat16": {"kv_cache_dtype": "bfloat16"},
    "float32, keys and values int8": {"kv_cache_dtype": "int8"},
    "int4, activations float32": {"quantization": "int4", "activation_dtype": "float32"},
    "int4, activations bfloat16": {"quantization": "int4", "activation_dtype": "bfloat16"},
    "int4, activations int16": {"quantization": "int4", "activation_dtype": "int16"},
    "int4, activations int8": {"quantization": "int4", "activation_dtype": "int8"},
    "int4-g64, activations bfloat16": {"quantization": "int4-g64", "activation_dtype": "bfloat16"},
}


def score(model: str, num_tokens: int, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns each token's log-probability, and the token that was the likeliest there."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(model, max_model_len=PIECE + 1, **({"dtype": "float32"} | options)) as llm:
        ids = llm.get_tokenizer().encode(inspect.getsource(argparse))[:num_tokens]
        pieces = [ids[begin : begin + PIECE] for begin in range(0, len(ids), PIECE)]
        prompts = [TokensPrompt(prompt_token_ids=piece) for piece in pieces if len(piece) > 1]
        chosen, likeliest = [], []
        for output in llm.generate(prompts, params):
            assert output.prompt_token_ids is not None
            assert output.prompt_logprobs is not None
            rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            for token, row in rows:
                chosen.append(row[token].logprob)
                likeliest.append(next(each for each, entry in row.items() if entry.rank == 1))
    return np.array(chosen), np.array(likeliest)


@click.command(help=__doc__.replace("\n    python", "\n\n    python"))
@click.option("--model", default="smollm2", show_default=True, help="A model directory or name.")
@click.option("--tokens", default=8192, show_default=True, help="How many tokens are scored.")
def main(model: str, tokens: int) -> None:
    reference: tuple[np.ndarray, np.ndarray] | None = None
    print(f"{'':34}{'nll':>9}{'mean |d|':>10}{'most |d|':>10}{'same':>8}")
    for name, options in SETTINGS.items():
        try:
            found = score(model, tokens, options)
        except EngineStartError as problem:
            print(f"{name:34} {problem}")
            continue
        reference = reference or found
        moved = np.abs(found[0] - reference[0])
        same = np.mean(found[1] == reference[1])
        line = f"{-found[0].mean():9.4f}{moved.mean():10.5f}{moved.max():10.4f}{same:8.2%}"
        print(f"{name:34}{line}", flush=True)


if __name__ == "__main__":
    main()
