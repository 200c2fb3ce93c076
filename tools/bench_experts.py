#!/usr/bin/env python3
"""Compares decode steps of a mixture of experts with those of dense models.

    python tools/bench_experts.py [--requests 1] [--experts 16] [--top-k 2] [--rounds 15]

Three models with random weights have the same attention. One has experts; the MLP of the second has
as many active parameters as a token's experts; that of the third has as many as the experts that a
step reads, which the tool counts. The rounds are interleaved: each times some steps of every model,
and the result is the median of the rounds' ratios, so that other programs on the machine disturb
it little.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from bench_steps import fill, make_core

from shmllm.engine.core import EngineCore
from shmllm.worker.cpu.runner import CpuRunner

CONTEXT = 32
WARMUP_STEPS = 3


@dataclass
class Shape:
    """The shape of the models."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    experts: int
    top_k: int

    def config(self, inner: int | None) -> dict[str, Any]:
        """The content of config.json: of experts, or of an MLP of the width `inner`."""
        kind = {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": inner}
        if inner is None:
            kind = {
                "architectures": ["Qwen3MoeForCausalLM"],
                "intermediate_size": self.inner,
                "moe_intermediate_size": self.inner,
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "norm_topk_prob": True,
            }
        return kind | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
        }


class Model:
    """An engine core with requests that decode.

    Args:
        config: the content of config.json.
        requests: the number of requests.
        steps: the number of steps that they can take.
        threads: the number of threads that compute; None: the usable cores.
        dtype: the dtype of the weights.
    """

    def __init__(
        self, config: dict[str, Any], requests: int, steps: int, threads: int | None, dtype: str
    ) -> None:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            load = {"load_format": "dummy", "max_model_len": CONTEXT + steps + 8}
            made = make_core(directory, requests, threads, dtype=dtype, **load)
        self.core: EngineCore = made[0]
        self.runner: CpuRunner = made[1]
        fill(self.core, requests, CONTEXT, steps + 4)

    def median_ms(self, steps: int) -> float:
        """The median time of some steps."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            self.core.step()
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)


def experts_per_step(model: Model, requests: int, steps: int) -> float:
    """The mean number of experts whose weights a layer reads in a step; the last layer's stands
    for all."""
    from shmllm.worker.cpu.program import CpuProgram

    program = model.runner._program
    assert isinstance(program, CpuProgram)
    (buffers,) = program.buffers.experts.values()
    counts = []
    for _ in range(steps):
        model.core.step()
        counts.append(len(set(buffers.ids[:requests].flatten().tolist())))
    return statistics.fmean(counts)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--requests", default=1, show_default=True, help="Requests that decode at once.")
@click.option("--experts", default=16, show_default=True, help="Experts of a layer.")
@click.option("--top-k", default=2, show_default=True, help="Experts of a token.")
@click.option("--hidden", default=768, show_default=True, help="Width of the residual stream.")
@click.option("--inner", default=512, show_default=True, help="Width of an expert.")
@click.option("--layers", default=12, show_default=True, help="Layers.")
@click.option("--vocab", default=8192, show_default=True, help="Tokens of the vocabulary.")
@click.option("--rounds", default=15, show_default=True, help="Interleaved rounds.")
@click.option("--steps", default=8, show_default=True, help="Steps of a model in each round.")
@click.option("--threads", type=int, help="Compute threads.  [default: the usable cores]")
@click.option("--dtype", default="bfloat16", show_default=True, help="The dtype of the weights.")
def main(
    requests: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    layers: int,
    vocab: int,
    rounds: int,
    steps: int,
    threads: int | None,
    dtype: str,
) -> None:
    heads = hidden // 64
    shape = Shape(hidden, layers, heads, max(heads // 3, 1), inner, vocab, experts, top_k)
    total = (rounds + 1) * steps + WARMUP_STEPS

    def make(width: int | None) -> Model:
        return Model(shape.config(width), requests, total + steps, threads, dtype)

    mixture = make(None)
    read = experts_per_step(mixture, requests, steps)
    models = {
        "experts": mixture,
        "active": make(top_k * inner),
        "bytes": make(round(read * inner)),
    }
    for model in models.values():
        model.median_ms(WARMUP_STEPS)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(model.median_ms(steps))
    ratios = {
        name: [a / b for a, b in zip(times["experts"], times[name], strict=True)]
        for name in ("active", "bytes")
    }
    result = {
        "requests": requests,
        "experts_read": read,
        "median_ms": {name: statistics.median(each) for name, each in times.items()},
        "ratio_to_active": statistics.median(ratios["active"]),
        "ratio_to_bytes": statistics.median(ratios["bytes"]),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
