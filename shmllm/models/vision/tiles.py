"""The tiles of an image, and the patches of a tile."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shmllm.models.vision.specs import Grid

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
