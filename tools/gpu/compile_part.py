"""A part of gpu_check: compiles the kernels of engines in parallel, before anything is timed.

Triton compiles a kernel at its first launch, in seconds, one after the other. Here each of several
processes runs the same starts of engines without a device and compiles its share of the kernels
that they launch (`dry_run`). The GPU's processes then find them in Triton's cache on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.figures import Figures
from gpu.resume import digest, machine_key
from gpu.settings import Settings, settings_for

MOST_WORKERS = 16
MOST_ERRORS = 5
SLOWEST = 5
CODE = ("shmllm", "kernels", "tools/gpu")


def run(settings: Settings, figures: Figures, *sizes: str) -> None:
    mark = cache_directory() / f"gpu-check-{digest(CODE)}-{'-'.join(sizes)}"
    key = f"{machine_key(settings.rehearsal)}\n"
    if mark.exists() and mark.read_text("utf-8") == key and not settings.rehearsal:
        figures.put("kernels", "compiled by an earlier run on this machine")
        return
    # The small models of a rehearsal launch the same kernels.
    for name, value in compile_ahead(settings, sizes[: 1 if settings.rehearsal else None]).items():
        figures.put(name, value)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(key, "utf-8")


def cache_directory() -> Path:
    """Returns the folder of Triton's cache on disk."""
    found = os.environ.get("TRITON_CACHE_DIR")
    return Path(found) if found else Path.home() / ".triton" / "cache"


def num_cached() -> int:
    """Returns the number of kernels in Triton's cache; the difference of two calls is the number
    of kernels that were compiled meanwhile."""
    return sum(entry.is_dir() for entry in cache_directory().glob("*"))


def compile_ahead(settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Compiles the kernels that some code launches.

    Args:
        settings: the sizes.
        names: sizes of models, whose engines are started; "tiny", the engine of the part `first`;
            "tiles" and "stages", its attention; "packed", the products with packed weights.

    Returns:
        kernels, the number of different kernels; workers; seconds; slowest, the seconds of the
        slowest kernels.

    Raises:
        RuntimeError: a kernel cannot be compiled.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {"kernels": 0}
    began = time.monotonic()
    workers = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    card = _card(settings)
    work = [(settings.rehearsal, tuple(names), card, n, workers) for n in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        shares = list(pool.map(_compile_share, work))
    seconds = {name: took for share in shares for name, took in share["seconds"].items()}
    errors = [f"{name}: {what}" for share in shares for name, what in share["errors"].items()]
    if errors:
        raise RuntimeError(f"{len(errors)} kernels: {'; '.join(errors[:MOST_ERRORS])}")
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:SLOWEST]
    return {
        "kernels": len(set().union(*(share["kernels"] for share in shares))),
        "compiled": len(seconds),
        "workers": workers,
        "seconds": round(time.monotonic() - began, 1),
        "slowest": {name: round(seconds[name], 2) for name in slowest},
    }


def _card(settings: Settings) -> tuple[tuple[int, int], int]:
    if settings.rehearsal:
        return (9, 0), 132
    import torch

    properties = torch.cuda.get_device_properties(0)
    return (properties.major, properties.minor), properties.multi_processor_count


def _compile_share(work: tuple[bool, tuple[str, ...], Any, int, int]) -> dict[str, Any]:
    rehearsal, names, card, number, workers = work
    settings = settings_for(rehearsal)

    def work_of(device: Any) -> None:
        for name in names:
            launch(settings, name, device)

    return compile_launched(card, Share(number, workers, settings.most_kernels).has, work_of)


@dataclass(frozen=True)
class Share:
    """What one of several processes does of a list that all of them have.

    Attributes:
        number, workers: the number of the process, and how many there are.
        most: how many entries of the list count; None: all.
    """

    number: int
    workers: int
    most: int | None

    def has(self, entry: int) -> bool:
        return entry % self.workers == self.number and (self.most is None or entry < self.most)


def compile_launched(
    card: tuple[tuple[int, int], int],
    is_chosen: Callable[[int], bool],
    work: Callable[[Any], None],
    where: str = "meta",
) -> dict[str, Any]:
    """Compiles kernels that some work launches. A process can do it once, and nothing else.

    Args:
        card: the compute capability and the number of multiprocessors.
        is_chosen: called with the number of a kernel; whether this process compiles it.
        work: called with the device of a dry run.
        where: the device of its tensors: "meta" or "cpu".

    Returns:
        seconds and errors: see `dry_run.Launches`; kernels, the names and keys of all.
    """
    import torch

    from gpu.dry_run import Card, Launches, dry_run
    from shmllm_kernels.gpu.cache_keys import fix_cache_keys

    torch.set_num_threads(1)
    fix_cache_keys()
    launches = Launches(is_chosen)
    with dry_run(Card(*card), launches, torch.device(where)) as device:
        work(device)
    return {
        "seconds": launches.seconds,
        "errors": launches.errors,
        "kernels": set(launches.numbers),
    }


def launch(settings: Settings, name: str, device: Any) -> None:
    """Launches all kernels of a name; see `compile_ahead`."""
    from gpu import first_part

    on_gpu = replace(settings, device="cuda")
    if name == "tiles":
        for case in first_part.tile_cases(on_gpu):
            case.launches(*case.current())[0]()
    elif name == "stages":
        for case in first_part.stage_cases(on_gpu):
            config, splits = case.current()
            for stages in settings.stages:
                case.launches(replace(config, num_stages=stages), splits)[0]()
    elif name == "packed":
        from gpu import packed_part

        for launch in packed_part.launches(on_gpu):
            launch()
    elif name == "tiny":
        options = first_part.tiny_options(settings)
        options.pop("multiprocess", None)
        _start(first_part.tiny_model(settings), device, options)
    else:
        # All layers of a kind launch the same kernels.
        directory = settings.directory(name, settings.model(name).first_layers())
        _start(str(directory), device, settings.engine_options(name))


def _start(model: str, device: Any, options: dict[str, Any]) -> None:
    """Starts an engine's runner, which warms up and captures."""
    from shmllm.frontend.options.engine_options import make_engine_config
    from shmllm.worker.gpu.runner import GpuRunner

    options = options | {"device": "cuda", "load_format": "dummy"}
    GpuRunner(make_engine_config(model, **options), device)
