#!/usr/bin/env python3
"""Measures what adapters (LoRA) cost: steps with and without them, in turns.

    python tools/bench_lora.py --model MODEL [--requests 16] [--adapters 8] [--rank 16]

The tool makes random adapters for a model, in PEFT's files, and two engine cores in this process,
one without `enable_lora`. In each round every case decodes the same number of tokens, beginning
with that engine, and its tokens a second are divided by those of that engine in that round:

    unused  an engine with adapters, whose requests have none
    q and v requests with adapters of the projections of queries and values
    all     requests with adapters of all projections, and of routers; of experts if the model's
            checkpoint has a tensor for each

--cpu counts the CPU time of this process instead of wall time, which other programs disturb less;
use it with one thread, because several wait by spinning. --prompts times prompts in place of decode
steps. --write DIR only writes the adapters, for the `--lora` of `tools/compare.py`.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from shmllm.cli.bench_output import describe_machine
from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.config.lora import LoraConfig
from shmllm.core.request import Request
from shmllm.engine.core import EngineCore
from shmllm.frontend.model_files import resolve_model
from shmllm.models.lora_targets import LoraTargets
from shmllm.params.lora import LoRARequest
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.cpu.runner import CpuRunner

CASES = {"unused": (), "q and v": ("q_proj", "v_proj"), "all": ("",)}
"""By name the ends of the names of the modules that are adapted."""


def make_core(model: str, requests: int, threads: int | None, dtype: Any, lora: LoraConfig) -> Any:
    """An engine core, and its runner."""
    config = EngineConfig(
        LoadConfig(str(resolve_model(model)), dtype=dtype),
        CacheConfig(memory_bytes=2**30, enable_prefix_caching=False),
        SchedulerConfig(max(requests, 1)),
        lora=lora,
        num_threads=threads,
    )
    runner = CpuRunner(config)
    return EngineCore(config, runner), runner


def write_adapter(directory: Path, targets: LoraTargets, ends: tuple[str, ...], rank: int) -> None:
    """Writes a random adapter of the modules whose names end so."""
    tensors, modules = {}, set()
    for name in targets.names:
        target = targets.target_of(name)
        if target is not None and name.endswith(ends):
            modules.add(name.rpartition(".")[2])
            prefix = f"base_model.model.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, target.in_features) / 100
            tensors[f"{prefix}B.weight"] = torch.randn(target.out_features, rank) / 100
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(modules),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields))


def add_requests(
    core: EngineCore, loras: list[LoRARequest], requests: int, context: int, steps: int
) -> None:
    """Queues requests of random tokens, whose adapters take turns."""
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    for number in range(requests):
        prompt = [draw.randrange(core.info.vocab_size) for _ in range(context)]
        lora = loras[number % len(loras)] if loras else None
        refusal = core.add(0, EngineCoreRequest(number, prompt, params, lora=lora))
        assert refusal is None, refusal


def time_requests(core: EngineCore, is_prompts: bool, clock: Callable[[], int]) -> int:
    """Runs the queued requests to their end; returns the nanoseconds of prompts or of decoding."""
    began = clock()
    while any(each.num_computed_tokens < each.num_prompt_tokens for each in _requests(core)):
        core.step()
    caught_up = clock()
    while core.has_unfinished:
        core.step()
    return caught_up - began if is_prompts else clock() - caught_up


def _requests(core: EngineCore) -> list[Request]:
    return core.scheduler.requests()


def write_adapters(
    directory: Path, targets: LoraTargets, adapters: int, rank: int
) -> dict[str, list[Path]]:
    """Writes the adapters of each case; returns their directories, by the name of the case."""
    paths: dict[str, list[Path]] = {name: [] for name in CASES}
    for name, ends in CASES.items():
        for number in range(adapters if ends else 0):
            paths[name].append(directory / name.replace(" ", "-") / str(number))
            write_adapter(paths[name][-1], targets, ends, rank)
    return paths


def add_adapters(
    core: EngineCore, targets: LoraTargets, adapters: int, rank: int
) -> dict[str, list[LoRARequest]]:
    """Makes the adapters of each case known to an engine."""
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory() as directory:
        loras = {
            name: [LoRARequest(str(path), next(numbers), str(path)) for path in paths]
            for name, paths in write_adapters(Path(directory), targets, adapters, rank).items()
        }
        for lora in itertools.chain(*loras.values()):
            core.adapters.add(lora)
    return loras


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, help="Model directory or bundled name.")
@click.option("--dtype", default="bfloat16", help="Dtype of the model.")
@click.option("--requests", default=16, help="Requests that run at once.")
@click.option("--adapters", default=8, help="Adapters that the requests share.")
@click.option("--rank", default=16, help="Rank of the adapters.")
@click.option("--context", default=64, help="Tokens of each prompt.")
@click.option("--steps", default=24, help="Tokens that each request decodes.")
@click.option("--rounds", default=7, help="Rounds, of which the median counts.")
@click.option("--threads", type=int, help="Compute threads.")
@click.option("--cpu", is_flag=True, help="Count CPU time.")
@click.option("--prompts", "is_prompts", is_flag=True, help="Time prompts.")
@click.option("--write", type=click.Path(path_type=Path), help="Only write the adapters to DIR.")
@click.option("--json", "json_file", type=click.File("w"), help="Also write the JSON to FILE.")
def main(
    model: str, dtype: str, requests: int, adapters: int, rank: int, context: int, steps: int,
    rounds: int, threads: int | None, cpu: bool, is_prompts: bool, write: Path | None,
    json_file: Any,
) -> None:  # fmt: skip
    """Measure what adapters cost."""
    clock = time.process_time_ns if cpu else time.perf_counter_ns
    lora = LoraConfig(True, adapters, max(rank, 16), 2 * adapters)
    core, runner = make_core(model, requests, threads, dtype, lora)
    targets = LoraTargets(runner.model)
    if write is not None:
        write_adapters(write, targets, adapters, rank)
        return
    base, _ = make_core(model, requests, threads, dtype, LoraConfig())
    loras = add_adapters(core, targets, adapters, rank)
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    seconds: list[float] = []
    for _ in range(rounds + 1):
        times = {}
        for name, one in {"base": base, **dict.fromkeys(CASES, core)}.items():
            add_requests(one, loras.get(name, []), requests, context, steps)
            times[name] = time_requests(one, is_prompts, clock)
        seconds.append(times["base"] / 1e9)
        for name in CASES:
            ratios[name].append(times["base"] / times[name])
    tokens = requests * (context if is_prompts else steps)
    record = {
        "machine": describe_machine(),
        "base_tokens_per_s": tokens / statistics.median(seconds[1:]),
        "ratios": {name: statistics.median(found[1:]) for name, found in ratios.items()},
        "ranges": {name: [min(found[1:]), max(found[1:])] for name, found in ratios.items()},
    }
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
