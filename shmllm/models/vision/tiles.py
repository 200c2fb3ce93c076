"""The tiles of an image, and the patches of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor

from shmllm.models.vision.grids import Grid

Pixels = Tensor | Sequence[Tensor]
"""The tiles of an image, [tiles, 3, height, width], or something that makes each, [3, height,
width], when it is asked for it."""


def tiles_of(pixels: Pixels, grid: Grid) -> Pixels:
    """Returns the tiles of an image, to be computed one by one, so that their bits depend on
    nothing else.

    Raises:
        ValueError: the grid has another number of them.
    """
    if len(pixels) != grid[0]:
        raise ValueError(f"a grid of {grid[0]} tiles has {len(pixels)}")
    return pixels


def patches_of(pixels: Tensor, size: int) -> Tensor:
    """Returns the patches of an image, row by row; the rest at the right and at the bottom is left
    out.

    Args:
        pixels: [3, height, width].
        size: the height and the width of a patch.

    Returns:
        [rows, columns, 3, size, size], without a copy.
    """
    return pixels.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4)


def patches_of_tile(tile: Tensor, size: int, patch_size: int) -> Tensor:
    """Returns the patches of a square tile, row by row, each as one row of numbers.

    Args:
        tile: [3, size, size].
        size: the height and the width of the tile.
        patch_size: those of a patch.

    Returns:
        [patches, 3 * patch_size * patch_size].

    Raises:
        ValueError: the tile has another shape.
    """
    if tile.shape != (3, size, size):
        raise ValueError(f"a tile must be [3, {size}, {size}], not {list(tile.shape)}")
    return patches_of(tile, patch_size).flatten(2).flatten(0, 1)


def picture_of(tiles: Tensor, rows: int, columns: int, end: Tensor) -> Tensor:
    """Returns the embeddings of a picture that square tiles make up, row by row.

    Args:
        tiles: [rows * columns, embeddings of a tile, width].
        rows, columns: of tiles.
        end: the embedding behind each row of the picture, [width].

    Returns:
        [embeddings, width].
    """
    side = isqrt(tiles.shape[1])
    picture = tiles.view(rows, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return torch.cat([picture, end.expand(len(picture), 1, -1)], 1).flatten(0, 1)
