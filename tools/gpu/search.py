"""Measures candidates for entries of the table of tile sizes, and records the best of each.

A search has some cases, all launches that the entry serves in measured models. The candidate with
the least time over all cases is measured once more, in turn with the present entry: the best of
many measurements is the one that noise has favoured most. `write_tiles` writes those that are
better by a margin into the table. This module must not know the kernels.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu.clock import synchronize
from gpu.figures import OUT_OF_TIME, Figures
from gpu.settings import Settings, settings_for
from shmllm_kernels.gpu.cache_keys import fix_cache_keys
from shmllm_kernels.gpu.configs import device_key
from shmllm_kernels.gpu.tiles import VERSION, Tiles

TOLERANCE = 2e-2
"""The largest relative difference of a candidate's result, by the norm of the whole tensor."""
TURNS = 5
"""How often the winner and the present entry are measured in turn; the medians count."""
WORKERS = 8
RESERVE_S = 90.0  # the time of one search
DEFAULT_S = 600.0


class Case(Protocol):
    """A launch, or some launches, on random tensors, with any tile sizes.

    Attributes:
        name: what it is, for the record.
        calls: how often a step of the measured models has it. 0.0: its time counts relative to
            that of the present entry, where a short launch matters as much as a long one.
    """

    @property
    def name(self) -> str: ...

    @property
    def calls(self) -> float: ...

    def result(self, config: Any) -> Tensor:
        """Launches once; returns what was written, in float32."""

    def seconds(self, config: Any) -> float:
        """Measures one launch."""


@dataclass(frozen=True)
class Search:
    """The search for one entry.

    Attributes:
        tiles: the entries of the kernel.
        size: the size of the entry; see `configs` for what it counts.
        cases: makes the cases, with large tensors.
        candidates: the tile sizes to measure, besides the present ones.
    """

    tiles: Tiles[Any]
    size: int
    cases: Callable[[Settings], Sequence[Case]]
    candidates: Sequence[Any]

    @property
    def name(self) -> str:
        return f"{self.tiles.kernel} {self.size}"

    def present(self, device: str) -> Any:
        """Returns the present tile sizes for a device."""
        return self.tiles.best(device, self.size)


def run(settings: Settings, figures: Figures, *modules: str) -> None:
    """Runs the searches of some modules that an earlier run has not done, until the time is over.

    Args:
        settings: the sizes.
        figures: gets "tiles": the version of the table and a row for each search, see `measure`.
        modules: modules of this package with a function `searches`.
    """
    ends = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", DEFAULT_S)) - RESERVE_S
    tiles: dict[str, Any] = figures.get("tiles") or {"version": VERSION, "rows": []}
    done = {(row["kernel"], row["size"]) for row in tiles["rows"]}
    left = [each for each in searches_of(modules, settings)
            if (each.tiles.kernel, each.size) not in done]  # fmt: skip
    if left:
        compile_ahead(settings, modules, {each.name for each in left})
    for search in left:
        if time.monotonic() > ends and not settings.rehearsal:
            sys.exit(OUT_OF_TIME)
        torch.manual_seed(0)
        tiles["rows"].append(measure(settings, search))
        figures.put("tiles", tiles)


def searches_of(modules: Sequence[str], settings: Settings) -> list[Search]:
    """Returns the searches of some modules, in their order."""
    found = (import_module(f"gpu.{module}").searches(settings) for module in modules)
    return [search for some in found for search in some]


def measure(settings: Settings, search: Search) -> dict[str, Any]:
    """Measures all candidates of a search.

    Returns:
        kernel, device and size: the entry; before and after: the present tile sizes and the best;
        us_before and us_after: their microseconds, all cases with their calls together; us: for
        each case the microseconds of each candidate that fits and whose result is right.
    """
    device = device_key(torch.device(settings.device))
    now, cases = search.present(device), search.cases(settings)
    wanted = [case.result(now).clone() for case in cases]
    times = {now: [case.seconds(now) for case in cases]}
    weights = [case.calls or 1.0 for case in cases]
    if not all(case.calls for case in cases):
        weights = [1e-6 / took for took in times[now]]  # a sum of 1 us for each
    for config in search.candidates:
        if config != now:
            times[config] = [_try(*each, config) for each in zip(cases, wanted, strict=True)]

    def total(each: Sequence[float]) -> float:
        return sum(weight * took for weight, took in zip(weights, each, strict=True))

    best = min(times, key=lambda config: total(times[config]))
    turns = [[[case.seconds(each) for case in cases] for each in (now, best)] for _ in range(TURNS)]
    before, after = (statistics.median(total(turn[n]) for turn in turns) for n in range(2))
    return {
        "kernel": search.tiles.kernel,
        "device": device,
        "size": search.size,
        "before": asdict(now),
        "after": asdict(best),
        "us_before": round(before * 1e6, 3),
        "us_after": round(after * 1e6, 3),
        "us": {case.name: _named(times, n) for n, case in enumerate(cases)},
    }


def compile_ahead(settings: Settings, modules: Sequence[str], names: set[str]) -> None:
    """Launches every candidate once, in several processes, so that Triton's cache on disk has it
    when it is measured. Compiling takes seconds for each candidate."""
    workers = min(WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))
    if settings.rehearsal:  # which compiles nothing, and only shows that the processes run
        workers, names = 1, {min(names)}
    work = [(settings.rehearsal, tuple(modules), names, n, workers) for n in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_share, work))


def _compile_share(work: tuple[bool, tuple[str, ...], set[str], int, int]) -> None:
    rehearsal, modules, names, number, workers = work
    settings = settings_for(rehearsal)
    if rehearsal:  # programs of one launch that wait for each other would wait for ever
        from gpu.rehearsal import interpret

        interpret()
    fix_cache_keys()
    for search in searches_of(modules, settings):
        if search.name not in names:
            continue
        for case in search.cases(settings):
            for config in search.candidates[number::workers]:
                with contextlib.suppress(Exception):  # the measurement runs and reports it again
                    case.result(config)
                    synchronize(torch.device(settings.device))


def _try(case: Case, wanted: Tensor, config: Any) -> float:
    """Returns the seconds of a launch; infinite if it does not fit or its result differs."""
    try:
        found = case.result(config)
        difference = float((found - wanted).norm() / wanted.norm())
        if difference < TOLERANCE:
            return case.seconds(config)
        problem = f"the result differs by {difference:.2g}"
    except Exception as error:  # Triton raises OutOfResources, its compiler many types
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    print(f"{case.name}, {config}: {problem}")
    return math.inf


def _named(times: dict[Any, list[float]], number: int) -> dict[str, float]:
    return {
        ", ".join(map(str, asdict(config).values())): round(took[number] * 1e6, 2)
        for config, took in times.items()
        if math.isfinite(took[number])
    }
