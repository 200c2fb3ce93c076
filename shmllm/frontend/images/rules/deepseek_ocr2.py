"""The images of DeepSeek-OCR and DeepSeek-OCR 2: the whole in the middle of a square, and tiles of
a large one before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.arrangements import (
    arrangements,
    check_pixels,
    cut,
    nearest,
    padded,
    read_colour,
    too_narrow,
)
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED


@dataclass(frozen=True)
class DeepseekOcr2Rules(Rules):
    """The rules of transformers' `DeepseekOcr2ImageProcessor`, which resizes always. The grid of
    tiles is (tiles, rows, columns), that of the whole (1, 0, 0).

    Attributes:
        tile: the side of a tile, in pixels; images up to it have no tiles.
        whole: the side of the square.
        fewest, most: the smallest and the largest number of tiles.
        background: the colour around an image that is not square, from 0 to 255.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"max_patches", "min_patches", "resample"})

    tile: int
    whole: int
    fewest: int
    most: int
    background: tuple[int, ...]
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        if not options.flag("crop_to_patches"):
            raise RequestError(
                "'crop_to_patches' false is not supported; supported: true",
                parameter="crop_to_patches",
            )
        size, tile = options.sides("size", FIXED), options.count("tile_size")
        if size["height"] != size["width"]:
            raise RequestError(f"'size' must be a square, not {size!r}", parameter="size")
        most = options.count("max_patches")
        check_pixels("max_patches", most, (tile, tile))
        return cls(
            tile=tile,
            whole=size["height"],
            fewest=options.count("min_patches"),
            most=most,
            background=read_colour(options),
            resample=options.filter(),
        )

    def tiles(self, picture: Picture) -> Tiles:
        whole = self._whole(picture)
        if max(picture.size) <= self.tile:
            return whole
        sides = self.tile, self.tile
        found = nearest(picture, sides, arrangements(self.fewest, self.most))
        pixels = cut(picture, sides, found, self.resample)
        columns, rows = found
        tiles = Tiles(pixels, (len(pixels), rows, columns))
        return Tiles(np.empty(0, np.uint8), (2, rows, columns), (tiles, whole))

    def _whole(self, picture: Picture) -> Tiles:
        from PIL import Image

        scale = self.whole / max(picture.size)
        width, height = (round(side * scale) for side in picture.size)
        if not min(width, height):
            raise too_narrow(picture, width, height)
        square: Any = Image.new("RGB", (self.whole, self.whole), self.background)
        place = (self.whole - width) // 2, (self.whole - height) // 2
        square.paste(resized(picture, width, height, self.resample), place)
        return Tiles(pixels_of(square)[None], (1, 0, 0))


@dataclass(frozen=True)
class DeepseekOcrRules(DeepseekOcr2Rules):
    """The same as the models' authors prepare images, DeepSeek-OCR's too: with pillow's
    `ImageOps.pad`, which rounds differently."""

    def _whole(self, picture: Picture) -> Tiles:
        square = self.whole, self.whole
        pixels = padded(picture, square, self.background, self.resample)
        return Tiles(pixels[None], (1, 0, 0))
