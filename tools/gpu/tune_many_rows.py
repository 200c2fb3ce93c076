"""Searches for the tiles of products of many rows, by the rows of the matrix, beside torch.

The cases are the matrices of all layers of two models with the rows of some decodes. A candidate
that is no default is measured as what it stands for: torch's product, and a launch for the
activation of an MLP. So the entry becomes a default where the kernel is faster. This module must
not know how a search measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.search import Search
from gpu.settings import Settings
from gpu.tune_few_rows import by_height
from gpu.tune_rows import RowMatrix, floats, matrices_of
from shmllm_kernels.gpu.activation import activate
from shmllm_kernels.gpu.configs import has_dependent_launches, num_multiprocessors
from shmllm_kernels.gpu.many_rows import ManyRowsScratch, multiply_rows
from shmllm_kernels.gpu.row_configs import MANY_ROWS, ManyRowsConfig
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.gpu.tiles import ANY, Tiles

TORCH = tuple(
    ManyRowsConfig(*each, is_default=0)
    for each in (
        *((128, 256, 64, 8, 4, 1), (128, 128, 64, 8, 5, 1)),
        *((128, 128, 64, 8, 3, 1), (64, 128, 64, 4, 3, 1)),
    )
)
"""What the entries are before they are measured."""
CANDIDATES = TORCH + tuple(
    ManyRowsConfig(*each, is_default=1)
    for each in (
        *((128, 256, 64, 8, 4, 1), (256, 128, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1)),
        *((128, 128, 64, 8, 5, 1), (128, 128, 64, 4, 5, 1), (128, 128, 128, 8, 3, 1)),
        *((128, 128, 64, 4, 3, 2), (64, 128, 64, 4, 6, 1), (64, 128, 64, 4, 4, 2)),
        *((128, 64, 64, 4, 6, 1), (64, 256, 64, 4, 5, 1), (256, 64, 64, 8, 5, 1)),
    )
)
"""Rows, rows of the matrix, elements of an iteration, warps, stages, programs."""
REHEARSED = tuple(
    ManyRowsConfig(16, 64, 32, 2, 2, 1, is_default=is_default) for is_default in (0, 1)
)
ROWS, REHEARSED_ROWS = (136, 192, 256), (5,)
"""The numbers of decodes: graphs have all multiples of eight."""
SILU = Activation("silu", True)


class ManyRowsCase:
    """The product of many rows with each of some equal matrices, with the activation behind it.

    Args:
        settings: the sizes.
        matrix: the matrix of a model.
        weights: the matrices.
        rows: the number of rows.
    """

    def __init__(
        self, settings: Settings, matrix: RowMatrix, weights: list[Tensor], rows: int
    ) -> None:
        self.name = f"{matrix.model} {matrix.name}, {rows} rows"
        self.calls = float(matrix.layers)
        self._device, self._rounds = torch.device(settings.device), settings.rounds
        self._weights = weights
        self._x = torch.randn(rows, matrix.k, device=self._device).to(self._weights[0].dtype)
        self._activation = SILU if matrix.name == "gate_up" else None
        self._product = self._x.new_empty(rows, matrix.n)
        self._out = self._product
        if self._activation is not None:
            self._out = self._x.new_empty(rows, matrix.n // 2)
        self._processors = num_multiprocessors(self._device)

    def result(self, config: ManyRowsConfig) -> Tensor:
        """Launches with all matrices, one behind the other, as a step does: what a launch leaves in
        the scratch memory is not right if the last result is not."""
        self._out.zero_()
        for work in self._works(config):
            work()
        return self._out.float()

    def seconds(self, config: ManyRowsConfig) -> float:
        return seconds_each(self._works(config), self._device, self._rounds)

    def _works(self, config: ManyRowsConfig) -> list[Callable[[], object]]:
        if not config.is_default:
            return [partial(self._multiply_by_torch, weight) for weight in self._weights]
        scratch = ManyRowsScratch.allocate(config, self._processors, self._device)
        return [
            partial(
                multiply_rows, self._out, self._x, weight, config, scratch, self._processors, None,
                self._activation, has_dependent_launches(self._device),
            )
            for weight in self._weights
        ]  # fmt: skip

    def _multiply_by_torch(self, weight: Tensor) -> None:
        torch.mm(self._x, weight.t(), out=self._product)
        if self._activation is not None:
            activate(self._out, self._product, self._activation.name, self._activation.is_gated)


def searches(settings: Settings) -> Iterator[Search]:
    tiles: Tiles[ManyRowsConfig] = MANY_ROWS
    for size, own in by_height(MANY_ROWS, matrices_of(settings)).items():
        candidates = CANDIDATES
        if settings.rehearsal:
            tiles, candidates = Tiles(MANY_ROWS.kernel, {(ANY, size): REHEARSED[0]}), REHEARSED
        yield Search(tiles, size, partial(cases, own), candidates)


def cases(matrices: Sequence[RowMatrix], settings: Settings) -> list[ManyRowsCase]:
    found = []
    for each in matrices:
        weights = [weight for weight in floats(settings, each) if isinstance(weight, Tensor)]
        for rows in REHEARSED_ROWS if settings.rehearsal else ROWS:
            found.append(ManyRowsCase(settings, each, weights, rows))
    return found
