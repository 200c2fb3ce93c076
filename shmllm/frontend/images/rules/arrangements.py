"""Images that are resized to a number of tiles whose ratio is nearest, and cut."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shmllm.frontend.images.picture import Picture, pixels_of, resized

Arrangement = tuple[int, int]
"""A number of columns and one of rows."""


def nearest(
    picture: Picture, tile: tuple[int, int], arrangements: Iterable[Arrangement]
) -> Arrangement:
    """How many tiles an image becomes: those with the nearest ratio of width to height, and of
    several the last ones that have less than twice its pixels, or else the first ones.

    Args:
        picture: an RGB image.
        tile: height and width of a tile, in pixels.
        arrangements: the possible ones.
    """
    width, height = picture.size
    ratio, least, found = width / height, float("inf"), (1, 1)
    for each in arrangements:
        columns, rows = each
        distance = abs(ratio - columns / rows)
        half = 0.5 * tile[0] * tile[1] * columns * rows
        if distance < least or (distance == least and width * height > half):
            least, found = distance, each
    return found


def cut(
    picture: Picture, tile: tuple[int, int], arrangement: Arrangement, resample: int
) -> NDArray[np.uint8]:
    """The tiles of an image that is resized to them, row by row, uint8 [tiles, height, width, 3].

    Args:
        picture: an RGB image.
        tile: height and width of a tile, in pixels.
        arrangement: how many tiles there are.
        resample: the filter of pillow.
    """
    (height, width), (columns, rows) = tile, arrangement
    whole = pixels_of(resized(picture, width * columns, height * rows, resample))
    tiles = whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles).reshape(rows * columns, height, width, 3)
