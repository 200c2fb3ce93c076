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
        colour: Any = options.values.get("background_color")
        if (
            not isinstance(colour, list | tuple)
            or len(colour) != 3
            or not all(type(each) is int and 0 <= each <= 255 for each in colour)
        ):
            raise RequestError(
                f"'background_color' must have 3 numbers from 0 to 255, not {colour!r}",
                parameter="background_color",
            )
        return cls(
            tile=tile,
            whole=size["height"],
            fewest=options.count("min_patches"),
            most=most,
            background=tuple(colour),
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

        width, height = self._sides_within(*picture.size)
        if not min(width, height):
            raise RequestError(
                f"an image of {picture.size[0]}x{picture.size[1]} pixels is too narrow: it becomes "
                f"{width}x{height} by the model's settings; crop it"
            )
        square: Any = Image.new("RGB", (self.whole, self.whole), self.background)
        place = self._before(width), self._before(height)
        square.paste(resized(picture, width, height, self.resample), place)
        return Tiles(pixels_of(square)[None], (1, 0, 0))

    def _sides_within(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image within the square."""
        scale = self.whole / max(width, height)
        return round(width * scale), round(height * scale)

    def _before(self, side: int) -> int:
        """How many pixels of the square are before a side of the image."""
        return (self.whole - side) // 2


@dataclass(frozen=True)
class DeepseekOcrRules(DeepseekOcr2Rules):
    """The same as the models' authors prepare images, DeepSeek-OCR's too: with pillow's
    `ImageOps.pad`, which rounds differently."""

    def _sides_within(self, width: int, height: int) -> tuple[int, int]:
        if width > height:
            return self.whole, round(height / width * self.whole)
        return round(width / height * self.whole), self.whole

    def _before(self, side: int) -> int:
        return round((self.whole - side) / 2)
