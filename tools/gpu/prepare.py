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

from gpu.compile_part import Share, compile_launched, launch, num_cached
from gpu.parts import Part
from gpu.settings import Settings, settings_for
from gpu.tests_part import SHARDS

CARD, DEVICE_KEY = ((9, 0), 132), "sm90"
SEARCHES, TESTS = "search:run", "tests_part:run"
ENGINES = "compile_part:run", "family_part:run"
TARGETS = SEARCHES, *ENGINES, TESTS
KEPT = (".cubin", ".json")
"""What a launch reads of what the compiler writes."""


def prepare(
    parts: Sequence[Part], directory: Path, rehearsal: bool, report: Callable[[str], object]
) -> int:
    """Compiles what some parts launch: of engines, of searches for tiles, and of tests.

    Args:
        parts: the parts, whose targets are in TARGETS.
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
        kernels = set().union(*(share["kernels"] for share in shares))
        report(f"{part.name}: {len(kernels)} kernels, {new} new, {took:.0f} s")
        for name, what in errors.items():
            report(f"  {name}: {what}")
        code = code or int(bool(errors))
    _drop_intermediate(directory)
    return code


def _compile_share(work: tuple[Part, bool, int, int]) -> dict[str, Any]:
    part, rehearsal, number, workers = work
    settings = replace(settings_for(rehearsal), device="cuda")
    share = Share(number, workers, settings.most_kernels)
    if part.target == TESTS:
        return _compile_tests(part, share)

    def work_of(device: Any) -> None:
        if part.target in ENGINES:
            for name in part.arguments[: 1 if rehearsal else None]:
                launch(settings, name, device)
        else:
            _launch_candidates(settings, part.arguments)

    return compile_launched(CARD, share.has, work_of)


def _compile_tests(part: Part, share: Share) -> dict[str, Any]:
    """Compiles all kernels of a share of the tests: what tests do besides takes long, too."""
    from gpu.dry_tests import launch_tests

    (shard,) = part.arguments
    return compile_launched(
        CARD,
        lambda _: True,
        lambda device: launch_tests(SHARDS[shard].arguments, device, share.has),
        where="cpu",
    )


def _launch_candidates(settings: Settings, modules: Sequence[str]) -> None:
    """Launches all that searches measure."""
    from gpu.search import searches_of

    for search in searches_of(modules, settings):
        for case in search.cases(settings):
            for config in dict.fromkeys((search.present(DEVICE_KEY), *search.candidates)):
                with contextlib.suppress(AssertionError):  # a tile that is none for it
                    case.result(config)


def _drop_intermediate(directory: Path) -> None:
    """Removes what the compiler writes besides, four fifths of the bytes."""
    for path in directory.glob("*/*"):
        if path.is_file() and path.suffix not in KEPT:
            path.unlink()
