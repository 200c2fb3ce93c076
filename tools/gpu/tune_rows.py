"""Searches for tile sizes of products of one row, with packed weights or not, by the elements of a
row.

Each candidate multiplies with the matrices of all layers of a model in turn, in one graph, with
what is fused with them. So the times include what a launch waits for the one before. A candidate's
time is that of the steps of all models in matrices of such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.packed_part import draw
from gpu.search import Search
from gpu.settings import Settings
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.packings import PackedRows, Rows
from shmllm_kernels.gpu.row_configs import (
    PACKED_ROW,
    SINGLE_ROW,
    SINGLE_ROW_TALL,
    TALL,
    FewRowsConfig,
    SingleRowConfig,
)
from shmllm_kernels.gpu.row_operands import Activation, RowNorm
from shmllm_kernels.gpu.single_row import multiply_row
from shmllm_kernels.gpu.tiles import ANY, Tiles

MODELS = ("1b", "8b")
KIND = "int4"
"""The packed weights of which the tiles are measured: the 4 bits that are used most."""
CANDIDATES = tuple(
    SingleRowConfig(*each)
    for each in (
        *((2, 512, 2), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 512, 2), (4, 512, 4)),
        *((4, 1024, 2), (4, 1024, 4), (4, 1024, 8), (4, 2048, 4), (4, 2048, 8), (8, 512, 2)),
        *((8, 512, 4), (8, 1024, 4), (8, 1024, 8), (16, 256, 4), (16, 512, 4)),
    )
)
PACKED_CANDIDATES = tuple(
    SingleRowConfig(*each)
    for each in (
        *((2, 1024, 2), (2, 2048, 4), (4, 512, 2), (4, 1024, 2), (4, 1024, 4), (4, 2048, 4)),
        *((8, 512, 2), (8, 512, 4), (8, 1024, 4), (8, 1024, 8), (16, 512, 4), (16, 512, 8)),
    )
)
REHEARSED = (SingleRowConfig(256, 64, 4), SingleRowConfig(128, 64, 4))
"""Tiles of which few are enough: an interpreter runs one after the other."""


@dataclass(frozen=True)
class RowMatrix:
    """A matrix of a model: n rows of k elements, with which a step multiplies `layers` times."""

    model: str
    name: str
    n: int
    k: int
    layers: int


class RowCase:
    """The product of some rows with each of some matrices, with what the engine fuses with it.

    Args:
        settings: the sizes.
        matrix: the matrix of a model.
        makes: returns a random matrix [n, k] in several copies, see `floats` and `packed`.
        launch: `multiply_row` or `multiply_rows`.
        num_rows: the number of rows.
    """

    def __init__(
        self,
        settings: Settings,
        matrix: RowMatrix,
        makes: Callable[..., list[Rows]],
        launch: Callable[..., None] = multiply_row,
        num_rows: int = 1,
    ) -> None:
        self._launch = launch
        self.name, self.calls = f"{matrix.model} {matrix.name}", float(matrix.layers)
        self._device, self._rounds = torch.device(settings.device), settings.rounds
        dtype = getattr(torch, settings.dtype)
        self._weights = makes(settings, matrix)
        is_gated, k = matrix.name == "gate_up", matrix.k
        self._x = torch.randn(num_rows, k, device=self._device).to(dtype)
        width = matrix.n // 2 if is_gated else matrix.n
        self._stream = torch.randn(num_rows, width, device=self._device).to(dtype)
        self._out = self._stream.clone()
        self._options: dict[str, Any] = {
            "is_dependent": has_dependent_launches(self._device),
            "adds": matrix.name in ("o", "down"),
        }
        if matrix.name in ("qkv", "gate_up"):
            ones = torch.ones(k, device=self._device, dtype=dtype)
            self._options["norm"] = RowNorm(ones, 1e-5, 0.0)
        if is_gated:
            self._options["activation"] = Activation("silu", True)

    def result(self, config: SingleRowConfig | FewRowsConfig) -> Tensor:
        self._out.copy_(self._stream)
        self._launch(self._out, self._x, self._weights[0], config, **self._options)
        return self._out.float()

    def seconds(self, config: SingleRowConfig | FewRowsConfig) -> float:
        works = [
            partial(self._launch, self._out, self._x, each, config, **self._options)
            for each in self._weights
        ]
        return seconds_each(works, self._device, self._rounds)


def searches(settings: Settings) -> Iterator[Search]:
    candidates, packed_candidates = CANDIDATES, PACKED_CANDIDATES
    if settings.rehearsal:
        candidates = packed_candidates = REHEARSED
    matrices = matrices_of(settings)
    tall = [each for each in matrices if each.n >= TALL]
    low = [each for each in matrices if each.n < TALL]
    for tiles, some, makes, tried in (
        (SINGLE_ROW, low, floats, candidates),
        (SINGLE_ROW_TALL, tall, floats, candidates),
        (PACKED_ROW, low, packed, packed_candidates),
    ):
        for size, own in by_entry(tiles, some).items():
            if settings.rehearsal:
                tiles = Tiles(tiles.kernel, {(ANY, size): REHEARSED[0]})
            yield Search(tiles, size, partial(cases, own, makes), tried)


def matrices_of(settings: Settings) -> list[RowMatrix]:
    """Returns the matrices of the measured models."""
    found = []
    for model in MODELS:
        shape = settings.shape(model)
        for name, (n, k) in shape.matrices().items():
            found.append(RowMatrix(model, name, n, k, 1 if name == "head" else shape.layers))
    return found


def by_entry(tiles: Tiles[Any], matrices: list[RowMatrix]) -> dict[int, list[RowMatrix]]:
    """Returns the matrices that each of a kernel's entries for all devices serves."""
    sizes = tiles.sizes(ANY)
    found: dict[int, list[RowMatrix]] = {}
    for each in matrices:
        size = min((most for most in sizes if most >= each.k), default=max(sizes))
        found.setdefault(size, []).append(each)
    return dict(sorted(found.items()))


def cases(
    matrices: list[RowMatrix], makes: Callable[..., list[Rows]], settings: Settings
) -> list[RowCase]:
    return [RowCase(settings, each, makes) for each in matrices]


def floats(settings: Settings, matrix: RowMatrix) -> list[Rows]:
    """Returns a random matrix in so many copies that no launch finds its own in a cache."""
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    one = torch.empty(matrix.n, matrix.k, device=device, dtype=dtype).normal_(std=matrix.k**-0.5)
    return [one, *(one.clone() for _ in range(_copies(settings, matrix, one.nbytes) - 1))]


def packed(settings: Settings, matrix: RowMatrix) -> list[Rows]:
    """Returns a random packed matrix in so many copies that no launch finds its own in a cache."""
    one, _ = draw(settings, KIND, (matrix.n, matrix.k))
    num_bytes = one.integers.nbytes + one.scales.nbytes
    return [
        PackedRows.of(KIND, one.integers.clone(), one.scales.clone(), matrix.k)
        for _ in range(_copies(settings, matrix, num_bytes))
    ]


def _copies(settings: Settings, matrix: RowMatrix, num_bytes: int) -> int:
    return max(2, min(matrix.layers, -(-settings.rotated_bytes // num_bytes)))
