"""Compiles for an H100 or H200, on a machine without one, what parts of gpu_check launch.

A GPU that is lent by the minute should not compile. The result is a folder for `TRITON_CACHE_DIR`:
it must have the same path there, and Triton must have the same version.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.compile_part import launch, num_cached
from gpu.parts import Part
from gpu.settings import settings_for

CAPABILITY, PROCESSORS = (9, 0), 132
SEARCHES, ENGINES = "search:run", "compile_part:run"
KEPT = (".cubin", ".json")
"""What a launch reads of what the compiler writes."""


def prepare(
    parts: Sequence[Part], directory: Path, rehearsal: bool, report: Callable[[str], object]
) -> int:
    """Compiles what some parts launch: of engines, and of searches for tiles.

    Args:
        parts: the parts, whose targets are SEARCHES and ENGINES.
        directory: the folder of the result; what is there is not compiled again.
        rehearsal: whether models are small and only the first kernels are compiled.
        report: called with a line for each part.

    Returns:
        The exit code: 1 if a kernel cannot be compiled.
    """
    os.environ["TRITON_CACHE_DIR"] = str(directory.resolve())
    workers, code = len(os.sched_getaffinity(0)), 0
    for part in parts:
        began, before = time.monotonic(), num_cached()
        work = [(part, rehearsal, number, workers) for number in range(workers)]
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            shares = list(pool.map(_compile_share, work))
        errors = {name: what for share in shares for name, what in share["errors"].items()}
        new, took = num_cached() - before, time.monotonic() - began
        report(f"{part.name}: {shares[0]['num_kernels']} kernels, {new} new, {took:.0f} s")
        for name, what in errors.items():
            report(f"  {name}: {what}")
        code = code or int(bool(errors))
    _drop_intermediate(directory)
    return code


def _compile_share(work: tuple[Part, bool, int, int]) -> dict[str, Any]:
    """Runs in a process of its own: compiles every `workers`-th kernel of a part."""
    part, rehearsal, number, workers = work
    import torch

    from gpu.dry_run import Card, Launches, dry_run
    from gpu.search import searches_of
    from shmllm_kernels.gpu.cache_keys import fix_cache_keys

    torch.set_num_threads(1)
    fix_cache_keys()
    settings = replace(settings_for(rehearsal), device="cuda")
    most = settings.most_kernels

    def is_chosen(kernel: int) -> bool:
        return kernel % workers == number and (most is None or kernel < most)

    launches = Launches(is_chosen)
    with dry_run(Card(CAPABILITY, PROCESSORS), launches) as device:
        if part.target == ENGINES:
            for name in part.arguments[: 1 if rehearsal else None]:
                launch(settings, name, device)
        else:
            for search in searches_of(part.arguments, settings):
                for case in search.cases(settings):
                    for config in dict.fromkeys((search.present("sm90"), *search.candidates)):
                        with contextlib.suppress(AssertionError):  # a tile that is none for it
                            case.result(config)
    return {"errors": launches.errors, "num_kernels": launches.num_kernels}


def _drop_intermediate(directory: Path) -> None:
    """Removes what the compiler writes besides, four fifths of the bytes."""
    for path in directory.glob("*/*"):
        if path.is_file() and path.suffix not in KEPT:
            path.unlink()
