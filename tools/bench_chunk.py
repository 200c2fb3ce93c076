#!/usr/bin/env python3
"""Measures a step that computes a chunk of prompts, in this process, beside a product of torch's.

    python tools/bench_chunk.py --model MODEL [--tokens 2048] [--requests 16] [--dtype bfloat16]

The tool computes the same number of random tokens for some requests at once, several times, and
prints the best time, the best time of each kernel by itself, and the rate of the products and of
the whole chunk, as shares of the rate of torch's product of 4096 x 4096 matrices in the dtype of
the products. The rates are right for dense models whose layers are alike.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import click
import torch
from bench_steps import make_core

from shmllm.engine.core import EngineCore
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.cpu.runner import CpuRunner

CUBE = 4096


def torch_rate(dtype: torch.dtype, repeats: int) -> float:
    """The best rate of torch's product of two square matrices of CUBE, in flops per second."""
    a, b = (torch.randn(CUBE, CUBE).to(dtype) for _ in range(2))
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * CUBE**3 / min(times[1:])


def compute(core: EngineCore, first: int, requests: int, tokens: int) -> float:
    """Computes the prompts of some requests in one step; returns the seconds."""
    draw, params = random.Random(first), SamplingParams(temperature=0, max_tokens=1)
    for number in range(first, first + requests):
        prompt = [draw.randrange(core.info.vocab_size) for _ in range(tokens // requests)]
        refusal = core.add(0, EngineCoreRequest(number, prompt, params))
        assert refusal is None, refusal
    began = time.perf_counter()
    rows = sum(len(columns.numbers) for columns in core.step().values())
    assert rows == requests, "one step has computed all prompts"
    return time.perf_counter() - began


def kernel_times(
    core: EngineCore, runner: CpuRunner, repeats: int, requests: int, tokens: int
) -> dict[str, float]:
    """By label, the best seconds of its kernels."""
    best: dict[str, float] = {}

    @contextlib.contextmanager
    def observe(label: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        spent[label] = spent.get(label, 0.0) + time.perf_counter() - began

    runner.observe(observe)
    for index in range(repeats):
        spent: dict[str, float] = {}
        compute(core, (1 + index) * 10_000, requests, tokens)
        for label, seconds in spent.items():
            best[label] = min(best.get(label, seconds), seconds)
    runner.observe(None)
    return dict(sorted(best.items(), key=lambda item: -item[1]))


def product_flops(labels: list[str], num_layers: int, tokens: int) -> dict[str, int]:
    """By label, the flops of products that each layer of a dense model has once."""
    matches = (re.fullmatch(r"(?:multiply|gate_and_up) (\d+)x(\d+)", label) for label in labels)
    sizes = {found[0]: (int(found[1]), int(found[2])) for found in matches if found}
    return {label: 2 * a * b * tokens * num_layers for label, (a, b) in sizes.items()}


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--model", required=True, help="Directory of a model.")
@click.option(
    "--tokens",
    default=2048,
    show_default=True,
    type=click.IntRange(1, 2048),
    help="Tokens of the chunk.",
)
@click.option("--requests", default=1, show_default=True, help="Requests that share them.")
@click.option("--threads", type=int, help="Compute threads.  [default: the usable cores]")
@click.option("--dtype", default="auto", show_default=True, help="The engine's dtype.")
@click.option("--quantization", help="As the engine's option.  [default: none]")
@click.option("--cpu-instructions", default="auto", show_default=True, help="Likewise.")
@click.option("--repeats", default=5, show_default=True, help="Times that each part runs.")
def main(
    model: str, tokens: int, requests: int, threads: int | None, repeats: int, **load: Any
) -> None:
    core, runner = make_core(
        model,
        requests,
        threads,
        max_model_len=tokens // requests + 2,
        **load,
    )
    compute(core, 0, requests, tokens)
    seconds = min(compute(core, 100 * (1 + i), requests, tokens) for i in range(repeats))
    kernels = kernel_times(core, runner, repeats, requests, tokens)
    flops = product_flops(list(kernels), runner.model.config.num_layers, tokens)
    flops.pop(f"multiply {core.info.vocab_size}x{runner.model.config.hidden_size}", None)
    dtype = torch.bfloat16 if runner.info.activation_dtype != "float32" else torch.float32
    rate, work = torch_rate(dtype, repeats), sum(flops.values())
    products = work / sum(kernels[label] for label in flops)
    result = {
        "tokens": tokens,
        "requests": requests,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "torch_gflops": rate / 1e9,
        "products_gflops": products / 1e9,
        "products_share": products / rate,
        "chunk_share": work / seconds / rate,
        "kernels_ms": {label: 1e3 * best for label, best in kernels.items()},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
