"""Searches for the tiles of products of up to eight rows, by the rows of the matrix.

The cases are the matrices of all layers of two models, with what is fused with them, and eight
rows. This module must not know how a search measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpu.search import Search
from gpu.settings import Settings
from gpu.tune_rows import RowCase, RowMatrix, floats, matrices_of, packed
from shmllm_kernels.gpu.few_rows import MAX_ROWS, multiply_rows
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.row_configs import FEW_ROWS, PACKED_FEW_ROWS, FewRowsConfig
from shmllm_kernels.gpu.tiles import ANY, Tiles

CANDIDATES = tuple(
    FewRowsConfig(*each)
    for each in (
        *(
            (16, 64, 4, 2),
            (16, 64, 4, 3),
            (16, 64, 4, 4),
            (16, 64, 8, 2),
            (16, 64, 8, 3),
            (16, 64, 8, 4),
        ),
        *((16, 128, 4, 2), (16, 128, 4, 3), (16, 32, 8, 4), (16, 32, 8, 6)),
        *((32, 32, 4, 4), (32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 8, 2), (32, 32, 8, 3)),
        *((64, 32, 4, 3), (64, 64, 4, 2), (64, 32, 8, 3)),
    )
)
"""Rows of the matrix, elements of half a slice, warps, stages."""
PACKED_CANDIDATES = tuple(
    FewRowsConfig(block_n, 32, num_warps, num_stages)
    for block_n in (16, 32)
    for num_warps in (4, 8)
    for num_stages in (3, 4, 6)
)
REHEARSED = (FewRowsConfig(256, 32, 4, 2), FewRowsConfig(128, 32, 4, 2))
"""Tiles of which few are enough: an interpreter runs one after the other."""


def searches(settings: Settings) -> Iterator[Search]:
    matrices = matrices_of(settings)
    for tiles, makes, tried in (
        (FEW_ROWS, floats, CANDIDATES),
        (PACKED_FEW_ROWS, packed, PACKED_CANDIDATES),
    ):
        for size, own in by_height(tiles, matrices).items():
            if settings.rehearsal:
                tiles, tried = Tiles(tiles.kernel, {(ANY, size): REHEARSED[0]}), REHEARSED
            yield Search(tiles, size, partial(cases, own, makes), tried)


def by_height(tiles: Tiles[Any], matrices: Sequence[RowMatrix]) -> dict[int, list[RowMatrix]]:
    """Returns the matrices that each of a kernel's entries serves."""
    sizes = tiles.sizes(ANY)
    found: dict[int, list[RowMatrix]] = {}
    for each in matrices:
        size = min((most for most in sizes if most >= each.n), default=max(sizes))
        found.setdefault(size, []).append(each)
    return dict(sorted(found.items()))


def cases(
    matrices: Sequence[RowMatrix], makes: Callable[..., list[Rows]], settings: Settings
) -> list[RowCase]:
    return [RowCase(settings, each, makes, multiply_rows, MAX_ROWS) for each in matrices]
