"""Llama 4's images: as large as square tiles allow without a change of their ratio, padded with
black at the right and at the bottom, cut row by row, and behind several tiles the whole image as
one more, which has the ratio of a tile. The grid is (tiles, rows, columns)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import MOST_PIXELS, Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED


@dataclass(frozen=True)
class Llama4Rules(Rules):
    """The rules of transformers' `Llama4ImageProcessor`, which resizes with torchvision; here
    pillow does.

    Attributes:
        side: height and width of a tile, in pixels.
        most: the largest number of tiles, without that of the whole image.
        fills: whether an image becomes as large as tiles allow; otherwise it is never enlarged
            beyond one tile.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"max_patches", "resample", "resize_to_max_canvas", "size"}
    )

    side: int
    most: int
    fills: bool
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        if not options.flag("do_resize"):
            raise RequestError("'do_resize' false is not supported", parameter="do_resize")
        size, most = options.sides("size", FIXED), options.count("max_patches")
        side = size["height"]
        if size["width"] != side:
            raise RequestError(f"'size' must be that of a square, not {size}", parameter="size")
        if (pixels := most * side**2) > MOST_PIXELS:
            raise RequestError(
                f"'max_patches' ({most}) allows images of {pixels:,} pixels, more than "
                f"{MOST_PIXELS:,}",
                parameter="max_patches",
            )
        return cls(side, most, options.flag("resize_to_max_canvas"), options.filter())

    def tiles(self, picture: Picture) -> Tiles:
        side, (width, height) = self.side, picture.size
        rows, columns = self._rows_and_columns(height, width)
        limits = rows * side, columns * side
        if not self.fills:
            limits = min(max(height, side), limits[0]), min(max(width, side), limits[1])
        new_height, new_width = _within(height, width, *limits)
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[:new_height, :new_width] = pixels_of(
            resized(picture, new_width, new_height, self.resample)
        )
        count = rows * columns
        pixels = np.empty((count + (count > 1), side, side, 3), np.uint8)
        pixels[:count].reshape(rows, columns, side, side, 3)[...] = canvas.reshape(
            rows, side, columns, side, 3
        ).swapaxes(1, 2)
        if count > 1:
            pixels[-1] = pixels_of(resized(picture, side, side, self.resample))
        return Tiles(pixels, (len(pixels), rows, columns))

    def sides(self) -> tuple[int, int]:
        return self.side, self.side

    def _rows_and_columns(self, height: int, width: int) -> tuple[int, int]:
        """How the tiles lie that an image is enlarged least for, or else reduced least; of several
        such arrangements the one with the fewest tiles."""
        found = _arrangements(self.most)
        sides = np.array(found, np.float32) * np.float32(self.side)
        scales = (sides / np.array([height, width], np.float32)).min(1)
        larger = scales[scales >= 1]
        choose = np.min if len(larger) and not self.fills else np.max
        scale = choose(larger if len(larger) else scales)
        return min(
            (each for each, own in zip(found, scales, strict=True) if own == scale),
            key=lambda each: each[0] * each[1],
        )


def _within(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """The largest height and width of the same ratio, rounded down, within bounds."""
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        most_height = min(math.floor(height * by_width), most_height)
    else:
        most_width = min(math.floor(width * by_height), most_width)
    return max(most_height, 1), max(most_width, 1)


@lru_cache(8)
def _arrangements(most: int) -> list[tuple[int, int]]:
    """All numbers of rows and columns, in transformers' order: by their ratio, those of more tiles
    first."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return [each for group in by_ratio.values() for each in group]
