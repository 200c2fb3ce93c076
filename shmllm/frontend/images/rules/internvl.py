"""InternVL's images: resized to the number of square tiles whose ratio is nearest, cut row by row,
and behind several tiles the whole image as one more. The grid is (tiles, rows, columns)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import MOST_PIXELS, Picture, pixels_of, resized
from shmllm.frontend.images.rules.arrangements import Arrangement, cut, nearest
from shmllm.frontend.images.rules.family import Grid, Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED


@dataclass(frozen=True)
class InternVLRules(Rules):
    """The rules of transformers' `GotOcr2ImageProcessor` within an `InternVLProcessor`, which cuts
    images into tiles whatever the file of the former says.

    Attributes:
        tile: height and width of a tile, in pixels.
        resize: whether an image that is not cut is resized.
        fewest: the smallest number of tiles, without that of the whole image.
        most: the largest one; 1 if images are not cut.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"crop_to_patches", "do_resize", "max_patches", "min_patches", "resample", "size"}
    )

    tile: tuple[int, int]
    resize: bool
    fewest: int
    most: int
    resample: int

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return values | {"crop_to_patches": True} | changes

    @classmethod
    def of(cls, options: Options) -> Self:
        size = options.sides("size", FIXED)
        most = options.count("max_patches") if options.flag("crop_to_patches") else 1
        if (pixels := most * size["height"] * size["width"]) > MOST_PIXELS:
            raise RequestError(
                f"'max_patches' ({most}) allows images of {pixels:,} pixels, more than "
                f"{MOST_PIXELS:,}",
                parameter="max_patches",
            )
        return cls(
            tile=(size["height"], size["width"]),
            resize=options.flag("do_resize"),
            fewest=options.count("min_patches"),
            most=most,
            resample=options.filter(),
        )

    def tiles(self, picture: Picture) -> Tiles:
        height, width = self.tile
        if self.most == 1:
            if self.resize:
                picture = resized(picture, width, height, self.resample)
            return Tiles(pixels_of(picture)[None], (1, 1, 1))
        found = nearest(picture, self.tile, _arrangements(self.fewest, self.most))
        columns, rows = found
        count = rows * columns
        pixels = np.empty((count + (count > 1), height, width, 3), np.uint8)
        pixels[:count] = cut(picture, self.tile, found, self.resample)
        if count > 1:
            pixels[-1] = pixels_of(resized(picture, width, height, self.resample))
        return Tiles(pixels, (len(pixels), rows, columns))

    def largest(self) -> Grid | None:
        return (self.most + (self.most > 1), 1, self.most)


@lru_cache(8)
def _arrangements(fewest: int, most: int) -> list[Arrangement]:
    """All arrangements, those with fewer tiles first."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(max(1, -(-fewest // columns)), most // columns + 1)
    ]
    return sorted(found, key=lambda each: each[0] * each[1])
