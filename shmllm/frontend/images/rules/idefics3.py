"""Idefics3's and SmolVLM's images: enlarged or reduced to a longest edge, cut into square tiles,
and behind the tiles the whole image as one more.

The grid is (tiles, rows, columns); rows and columns are 0 if there is only the whole image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED

MOST_SIDE = 4096
"""The longest side of a resized image, as in transformers."""

_LONGEST = ("longest_edge",)


@dataclass(frozen=True)
class Idefics3Rules(Rules):
    """The rules of transformers' `Idefics3ImageProcessor` and `SmolVLMImageProcessor`.

    Attributes:
        size: the longest edge of the resized image, or both sides; None if it keeps its size.
        tile: the side of a tile, in pixels.
        split: whether there are tiles; otherwise only the whole image.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_resize", "size", "do_image_splitting", "max_image_size", "resample"}
    )

    size: dict[str, int] | None
    tile: int
    split: bool
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        size = options.sides("size", _LONGEST, FIXED)
        return cls(
            size=size if options.flag("do_resize") else None,
            tile=options.sides("max_image_size", _LONGEST, one="longest_edge")["longest_edge"],
            split=options.flag("do_image_splitting"),
            resample=options.filter(),
        )

    def tiles(self, picture: Picture) -> Tiles:
        if self.size is not None:
            picture = resized(picture, *self._size_of(*picture.size), self.resample)
        if self.split:
            picture = resized(picture, *self._multiple(*picture.size), self.resample)
        columns, rows = (side // self.tile for side in picture.size)
        whole = resized(picture, self.tile, self.tile, self.resample)
        if not self.split or rows * columns == 1:
            return Tiles(pixels_of(whole)[None], (1, 0, 0))
        pixels = _cut(pixels_of(picture), rows, columns, self.tile)
        pixels[-1] = pixels_of(whole)
        return Tiles(pixels, (len(pixels), rows, columns))

    def sides(self) -> tuple[int, int]:
        return self.tile, self.tile

    def _size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image. With a longest edge, an odd shorter side becomes
        even; the bound of 4,096 pixels holds afterwards."""
        assert self.size is not None
        if "longest_edge" not in self.size:
            return self.size["width"], self.size["height"]
        longest, ratio = self.size["longest_edge"], width / height
        if width >= height:
            width, height = longest, _even(int(longest / ratio))
        else:
            width, height = _even(int(longest * ratio)), longest
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > MOST_SIDE:
            width, height = MOST_SIDE, int(MOST_SIDE / ratio)
        elif height > width and height > MOST_SIDE:
            width, height = int(MOST_SIDE * ratio), MOST_SIDE
        return max(width, 1), max(height, 1)

    def _multiple(self, width: int, height: int) -> tuple[int, int]:
        """Width and height rounded up to multiples of the tile's side: the longer one first, the
        other one after it has grown by the same ratio."""
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return width, self._up(int(width / ratio))
        height = self._up(height)
        return self._up(int(height * ratio)), height

    def _up(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile


def _even(side: int) -> int:
    return side + side % 2


def _cut(pixels: NDArray[np.uint8], rows: int, columns: int, tile: int) -> NDArray[np.uint8]:
    """The tiles of an image row by row, uint8 [rows * columns + 1, tile, tile, 3]; the last one is
    not filled."""
    tiles = np.empty((rows * columns + 1, tile, tile, 3), np.uint8)
    tiles[:-1].reshape(rows, columns, tile, tile, 3)[...] = pixels.reshape(
        rows, tile, columns, tile, 3
    ).swapaxes(1, 2)
    return tiles
