#!/usr/bin/env python3
"""How near decode and prefill come to what this machine's memory and arithmetic allow.

    python tools/make_model.py --size 135m models/135m
    python tools/bench_roofline.py models/135m [--dtype float32] [--json FILE]

    bandwidth  the most bytes a second that torch reads of 1 GiB with every core
               (sum, dot product, matrix times vector)
    decode     one request: bytes of all weights over the median time between tokens
    gemm       the most float operations a second of a large product: torch.mm, oneDNN packed
    prefill    a prompt of 512 tokens in one chunk: the operations of its products and
               attention over the time to its first token

The arms alternate, and of each the best of the rounds counts: a busy neighbour only adds time.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, TextIO

import click
import torch

from shmllm import LLM, SamplingParams
from shmllm.cli.bench import describe_machine

PREFILL_TOKENS = 512
DECODE_TOKENS = 128
GEMM_SIZES = ((512, 2048, 2048), (2048, 2048, 2048))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bandwidth_arms(dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], int]]:
    """What reads 1 GiB, and the bytes it reads."""
    matrix = torch.ones(2**30 // dtype.itemsize // 8192, 8192, dtype=dtype)
    vector, flat = torch.ones(8192, dtype=dtype), matrix.view(-1)
    half = flat.numel() // 2
    return {
        "sum": (flat.sum, matrix.nbytes),
        "dot": (lambda: torch.dot(flat[:half], flat[half:]), matrix.nbytes),
        "matrix times vector": (lambda: torch.mv(matrix, vector), matrix.nbytes),
    }


def gemm_arms(dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], int]]:
    """Large products, and the operations of each."""
    arms: dict[str, tuple[Callable[[], object], int]] = {}
    for rows, inner, columns in GEMM_SIZES:
        x = torch.randn(rows, inner).to(dtype)
        weight = torch.randn(columns, inner).to(dtype)
        pack = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        plain, packed = _products(x, weight.t().contiguous(), pack)
        flops = 2 * rows * inner * columns
        arms[f"mm {rows}x{inner}x{columns}"] = (plain, flops)
        arms[f"packed {rows}x{inner}x{columns}"] = (packed, flops)
    return arms


def _products(
    x: torch.Tensor, weight: torch.Tensor, pack: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        lambda: torch.mm(x, weight),
        lambda: torch.ops.mkldnn._linear_pointwise(x, pack, None, "none", [], ""),
    )


def token_times(llm: LLM, rng: random.Random, prompt_len: int, output_len: int) -> list[float]:
    """Moments of arrival and of each token of one request."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    ids = rng.choices(range(16, llm.facts.vocab_size), k=prompt_len)
    [request] = llm.prepare([{"prompt_token_ids": ids}], params)
    times: list[float] = []
    for changed in llm.serve([request], time_tokens=True):
        for state in changed:
            times = [state.metrics.arrival_time, *(state.token_times or [])]
    return times


def prefill_flops(config: dict[str, Any], num_parameters: int) -> int:
    """Of one chunk: every weight but the table for each token, the head for the last one, and
    the lower triangle of the attention."""
    head = config["vocab_size"] * config["hidden_size"]
    tables = head if config["tie_word_embeddings"] else 2 * head
    width = config["num_attention_heads"] * config["head_dim"]
    attention = 2 * PREFILL_TOKENS**2 * width * config["num_hidden_layers"]
    return 2 * PREFILL_TOKENS * (num_parameters - tables) + 2 * head + attention


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.argument("model", type=click.Path(exists=True))
@click.option("--dtype", default="float32")
@click.option("--quantization", default=None)
@click.option("--rounds", default=5)
@click.option("--json", "json_file", type=click.File("w", lazy=True))
def main(
    model: str, dtype: str, quantization: str | None, rounds: int, json_file: TextIO | None
) -> None:
    rng = random.Random(0)
    with open(f"{model}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    reads, products = bandwidth_arms(torch_dtype), gemm_arms(torch_dtype)
    best: dict[str, float] = {}

    def note(name: str, rate: float) -> None:
        best[name] = max(best.get(name, 0.0), rate)

    options: dict[str, Any] = {"quantization": quantization} if quantization else {}
    with LLM(model, dtype=dtype, enable_prefix_caching=False, max_model_len=1024, **options) as llm:
        flops = prefill_flops(config, llm.facts.num_parameters)
        weight_bytes = llm.facts.num_parameters * (1 if quantization else torch_dtype.itemsize)
        for _ in range(rounds):
            for name, (work, amount) in {**reads, **products}.items():
                note(name, amount / seconds(work))
            times = token_times(llm, rng, 32, DECODE_TOKENS)
            gaps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
            note("decode", weight_bytes / statistics.median(gaps))
            arrival, first = token_times(llm, rng, PREFILL_TOKENS, 1)
            note("prefill", flops / (first - arrival))
    bandwidth = max(best[name] for name in reads)
    gemm = max(best[name] for name in products)
    for name, rate in best.items():
        unit = "GB/s" if name in reads or name == "decode" else "GFLOP/s"
        click.echo(f"{name:>24} {rate / 1e9:8.1f} {unit}")
    click.echo(f"decode reads weights at {best['decode'] / bandwidth:.2f} of the bandwidth")
    click.echo(f"prefill computes at {best['prefill'] / gemm:.2f} of the large product's rate")
    if json_file is not None:
        record = {
            "machine": describe_machine(),
            "model": model,
            "dtype": dtype,
            "quantization": quantization,
            "per_second": best,
            "decode_over_bandwidth": best["decode"] / bandwidth,
            "prefill_over_gemm": best["prefill"] / gemm,
        }
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


if __name__ == "__main__":
    main()
