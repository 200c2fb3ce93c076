"""Gives the products of few rows wide tiles, so that Triton's interpreter runs few programs.

The interpreter takes as long for a program of 16 rows of a matrix as for one of 128. The tests of
the engine compare whole steps, which have no use for the number of programs; those of the kernels
have the tiles of production.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm_kernels.gpu import row_configs
from shmllm_kernels.gpu.tiles import ANY, Tiles

ROWS = 128
NAMES = (
    *("SINGLE_ROW", "SINGLE_ROW_TALL", "PACKED_ROW"),
    *("FEW_ROWS", "FEW_ROWS_FLOAT32", "PACKED_FEW_ROWS"),
)


def install() -> None:
    """Replace the tiles, for the lifetime of the process."""
    for name in NAMES:
        tiles = getattr(row_configs, name)
        wide = {
            (ANY, size): replace(config, block_n=ROWS) for size, config in tiles.sizes(ANY).items()
        }
        setattr(row_configs, name, Tiles(tiles.kernel, wide))
