"""An optional part of gpu_check: measures attention configs and proposes entries for the tables.

For decodes with whole and with split contexts and for prefill, and for each head size, all
candidates run on a few cases. The candidate
with the best times over all cases is proposed, with its speedup over the current entry. A candidate
that does not fit the device, or whose results differ, is left out. A run that was out of time goes
on with the next head size.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from gpu.attention_case import AttentionCase, AttentionSizes
from gpu.clock import synchronize
from gpu.figures import OUT_OF_TIME, Figures
from gpu.settings import Settings, settings_for
from shmllm_kernels.gpu.configs import MAX_SPLITS, AttentionConfig, device_key, next_power_of_two

HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 8)}
TABLES = {"decode": "_DECODE", "split_decode": "_SPLIT_DECODE", "prefill": "_PREFILL"}
STEPS = {  # requests, query, context
    "decode": ((64, 1, 1024), (256, 1, 1024)),
    "split_decode": ((1, 1, 1024), (8, 1, 1024), (4, 1, 16_384)),
    "prefill": ((1, 4096, 4096), (16, 256, 1024), (1, 64, 32_768)),
}
STAGES = (3, 5, 7)
"""Buffers for one, two and three tiles, since keys are loaded by a table's entries."""

TOLERANCE = 3e-2
WORKERS = 8
RESERVE_S = 90.0  # the time of one job
DEFAULT_S = 600.0


def run(settings: Settings, figures: Figures) -> None:
    ends = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", DEFAULT_S)) - RESERVE_S
    results: dict[str, Any] = figures.get("entries") or {}
    jobs = [(kind, dim) for dim in head_dims(settings) for kind in TABLES]
    jobs = [(kind, dim) for kind, dim in jobs if f"{kind} {dim}" not in results]
    compile_all(settings, jobs)
    for kind, dim in jobs:
        if time.monotonic() > ends:
            sys.exit(OUT_OF_TIME)
        results[f"{kind} {dim}"] = tune(settings, kind, dim)
        figures.put("entries", results)
        figures.put("python", as_python(results, device_key(torch.device(settings.device))))


def head_dims(settings: Settings) -> list[int]:
    return [16] if settings.rehearsal else list(HEADS)


def candidates(settings: Settings, kind: str, dim: int) -> list[AttentionConfig]:
    """Returns the configs to measure, without the current entry."""
    if settings.rehearsal:
        return [AttentionConfig(16, tile, 4, 1) for tile in (16, 32)]
    if kind != "prefill":
        tiles = (32, 64, 128) if dim < 256 else (16, 32, 64)
        return [AttentionConfig(16, *each) for each in itertools.product(tiles, (2, 4, 8), STAGES)]
    tiles, rows = ((32, 64, 128), (64, 128)) if dim < 256 else ((16, 32, 64), (64, 128))
    found = itertools.product(rows, tiles, (4, 8), STAGES)
    return [AttentionConfig(*each) for each in found]


def cases(settings: Settings, kind: str, dim: int) -> Iterator[AttentionCase]:
    """Yields the steps on which the candidates are measured."""
    heads, kv_heads = HEADS.get(dim, (4, 2))
    steps: tuple[tuple[int, int, int], ...] = STEPS[kind]
    if settings.rehearsal:
        steps = ((1, 20, 20),) if kind == "prefill" else ((2, 1, 40),)
    for step in steps:
        sizes = AttentionSizes(heads, kv_heads, dim, *step)
        yield AttentionCase(sizes, settings)


def tune(settings: Settings, kind: str, dim: int) -> dict[str, Any]:
    """Returns the best candidate over all cases, its gain, and the best number of splits for each
    case."""
    torch.manual_seed(0)
    made = list(cases(settings, kind, dim))
    now = [case.seconds(*case.current()) for case in made]
    wanted = [case.out.clone() for case in made]
    best, gain = made[0].current()[0], 1.0
    for config in candidates(settings, kind, dim):
        times = [
            _try(case, config, case.current()[1], out)
            for case, out in zip(made, wanted, strict=True)
        ]
        found = _geometric_mean([old / new for old, new in zip(now, times, strict=True)])
        if found > gain:
            best, gain = config, found
    result: dict[str, Any] = {
        "config": [best.block_m, best.tile, best.num_warps, best.num_stages],
        "gain": gain,
        "us": [round(took * 1e6, 2) for took in now],
    }
    result["splits"] = [_splits(case, best, out) for case, out in zip(made, wanted, strict=True)]
    return result


def compile_all(settings: Settings, jobs: list[tuple[str, int]]) -> None:
    """Launches every candidate once, in several processes, so that Triton's cache on disk has it
    when it is measured. Compiling takes seconds for each candidate."""
    workers = min(WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))
    work = [
        (settings.rehearsal, kind, dim, n, workers) for kind, dim in jobs for n in range(workers)
    ]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_share, work))


def as_python(results: dict[str, Any], key: str) -> str:
    """Returns the proposed entries as lines for configs.py."""
    lines = []
    for kind, table in TABLES.items():
        entries = {
            int(name.split()[1]): found
            for name, found in results.items()
            if name.startswith(f"{kind} ")
        }
        inner = ", ".join(
            f"{dim}: ({', '.join(map(str, found['config']))})" for dim, found in entries.items()
        )
        gains = ", ".join(f"{dim}: {found['gain']:.2f}" for dim, found in entries.items())
        if entries:
            lines.append(f'# {table}["{key}"], times as fast as before: {gains}')
            lines.append(f'    "{key}": {{{inner}}},')
    return "\n".join(lines)


def _compile_share(work: tuple[bool, str, int, int, int]) -> None:
    rehearsal, kind, dim, number, workers = work
    settings = settings_for(rehearsal)
    for case in cases(settings, kind, dim):
        for config in candidates(settings, kind, dim)[number::workers]:
            with contextlib.suppress(Exception):  # the measurement runs it again and reports it
                case.launches(config, case.current()[1])[0]()
                synchronize(case.out.device)


def _try(
    case: AttentionCase,
    config: AttentionConfig,
    splits: int,
    wanted: torch.Tensor,
) -> float:
    """Returns the seconds of a launch; infinite if it does not fit or its results differ."""
    case.out.fill_(math.nan)
    try:
        took = case.seconds(config, splits)
    except Exception as problem:  # Triton raises OutOfResources, its compiler many types
        print(f"{config}, {splits} splits: {type(problem).__name__}: {str(problem)[:200]}")
        return math.inf
    return took if torch.allclose(case.out, wanted, atol=TOLERANCE, rtol=TOLERANCE) else math.inf


def _splits(case: AttentionCase, config: AttentionConfig, wanted: torch.Tensor) -> dict[str, Any]:
    """Measures the numbers of splits; returns the microseconds of each and the fastest."""
    present = case.current()[1]
    most = min(MAX_SPLITS, 4 * present, next_power_of_two(-(-case.sizes.context // 16)))
    numbers = [1 << power for power in range(most.bit_length())]
    times = {n: _try(case, config, n, wanted) for n in numbers}
    fastest = min(times, key=lambda n: times[n])
    us = {str(n): round(took * 1e6, 2) for n, took in times.items() if math.isfinite(took)}
    return {"requests": case.sizes.requests, "present": present, "fastest": fastest, "us": us}


def _geometric_mean(ratios: list[float]) -> float:
    if not all(ratios):
        return 0.0
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
