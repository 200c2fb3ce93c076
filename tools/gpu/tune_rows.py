"""A part of gpu_check: measures the tiles of products of one row, and proposes entries.

Each candidate multiplies with the matrices of all layers of a model in turn, in one graph, with
what is fused with them. So the times include what a launch waits for the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.figures import Figures
from gpu.settings import Settings
from gpu.shapes import Shape
from shmllm_kernels.gpu.configs import (
    SingleRowConfig,
    has_dependent_launches,
    single_row_config,
)
from shmllm_kernels.gpu.row_operands import Activation, RowNorm
from shmllm_kernels.gpu.single_row import multiply_row

SIZES = ("1b", "8b")
Tile = tuple[int, int, int]
CANDIDATES: tuple[Tile, ...] = (
    *((2, 512, 2), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 512, 2), (4, 512, 4)),
    *((4, 1024, 2), (4, 1024, 4), (4, 1024, 8), (4, 2048, 4), (4, 2048, 8), (8, 512, 2)),
    *((8, 512, 4), (8, 1024, 4), (8, 1024, 8), (16, 256, 4), (16, 512, 4)),
)
"""Columns, elements of a row, and warps."""
REHEARSED: tuple[Tile, ...] = ((256, 64, 4), (128, 64, 4))
"""Tiles of which few are enough: an interpreter runs one after the other."""
TOLERANCE = 2e-2


def run(settings: Settings, figures: Figures) -> None:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for size in SIZES:
        found[size] = measure(settings, settings.shape(size))
        figures.put("us", {s: {m: _named(e) for m, e in f.items()} for s, f in found.items()})
    figures.put("python", as_python(best_by_width(found)))


def measure(settings: Settings, shape: Shape) -> dict[str, Any]:
    """Measures all candidates.

    Returns:
        By matrix: k, the elements of a row; calls, how often a step multiplies with such a matrix;
        and us, the microseconds of each candidate whose results are right.
    """
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    found: dict[str, Any] = {}
    for name, (outputs, k) in shape.matrices().items():
        one = (torch.randn(outputs, k, device=device) * k**-0.5).to(dtype)
        copies = max(2, min(shape.layers, -(-settings.rotated_bytes // one.nbytes)))
        weights = [one, *(one.clone() for _ in range(copies - 1))]
        calls = 1 if name == "head" else shape.layers
        found[name] = {"k": k, "calls": calls, "us": _times(settings, name, weights)}
    return found


def best_by_width(found: Mapping[str, Any]) -> dict[int, Tile]:
    """Returns, for each number of elements of a row, the candidate with which the steps of all
    models take the least time in matrices of such rows."""
    total: dict[int, dict[Tile, float]] = {}
    for matrices in found.values():
        for each in matrices.values():
            times = total.setdefault(each["k"], {})
            for tile, us in each["us"].items():
                times[tile] = times.get(tile, 0.0) + each["calls"] * us
    return {k: min(times, key=lambda tile: times[tile]) for k, times in sorted(total.items())}


def as_python(best: Mapping[int, Tile]) -> str:
    """Returns the proposed entries as a line for configs.py."""
    return "_SINGLE_ROW: " + ", ".join(f"{k}: {tile}" for k, tile in best.items())


def _named(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"us": {str(tile): round(us, 2) for tile, us in entry["us"].items()}}


def _times(settings: Settings, name: str, weights: list[Tensor]) -> dict[Tile, float]:
    """Returns the microseconds of each candidate with some matrices in turn."""
    outputs, k = weights[0].shape
    device, dtype = weights[0].device, weights[0].dtype
    is_gated = name == "gate_up"
    x = torch.randn(1, k, device=device).to(dtype)
    stream = torch.randn(1, outputs // 2 if is_gated else outputs, device=device).to(dtype)
    out = stream.clone()
    options: dict[str, Any] = {"is_dependent": has_dependent_launches(device)}
    if name in ("qkv", "gate_up"):
        options["norm"] = RowNorm(torch.ones(k, device=device, dtype=dtype), 1e-5, 0.0)
    if is_gated:
        options["activation"] = Activation("silu", True)
    options["adds"] = name in ("o", "down")

    def first(config: SingleRowConfig) -> Tensor:
        out.copy_(stream)
        multiply_row(out, x, weights[0], config, **options)
        return out.float()

    tiles, now = CANDIDATES, single_row_config(outputs, k)
    if settings.rehearsal:
        tiles, now = REHEARSED, SingleRowConfig(*REHEARSED[0])
    wanted = first(now).clone()
    found = {}
    for tile in tiles:
        config = SingleRowConfig(*tile)
        if float((first(config) - wanted).norm() / wanted.norm()) < TOLERANCE:
            works = [partial(multiply_row, out, x, each, config, **options) for each in weights]
            found[tile] = seconds_each(works, device, settings.rounds) * 1e6
    return found
