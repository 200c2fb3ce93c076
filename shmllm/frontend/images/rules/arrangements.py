"""Images that are resized to a number of tiles, and cut row by row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import MOST_PIXELS, Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED

Arrangement = tuple[int, int]
"""A number of columns and one of rows."""


@dataclass(frozen=True)
class ArrangedRules(Rules):
    """Behind several tiles there is the whole image as one more. The grid is (tiles, rows,
    columns).

    Attributes:
        tile: height and width of a tile, in pixels.
        resize: whether an image that is not cut is resized.
        most: the largest number of tiles, without that of the whole image; 1 if images are not cut.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"crop_to_patches", "do_resize", "max_patches", "resample", "size"}
    )

    tile: tuple[int, int]
    resize: bool
    most: int
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        return cls(**cls._read(options))

    @classmethod
    def _read(cls, options: Options) -> dict[str, Any]:
        """The attributes by their names."""
        size = options.sides("size", FIXED)
        most = options.count("max_patches") if options.flag("crop_to_patches") else 1
        tile = size["height"], size["width"]
        check_pixels("max_patches", most, tile)
        return {
            "tile": tile,
            "resize": options.flag("do_resize"),
            "most": most,
            "resample": options.filter(),
        }

    @abstractmethod
    def arrangement(self, picture: Picture) -> Arrangement:
        """How many tiles an image becomes."""

    def tiles(self, picture: Picture) -> Tiles:
        height, width = self.tile
        if self.most == 1:
            if self.resize:
                picture = resized(picture, width, height, self.resample)
            return Tiles(pixels_of(picture)[None], (1, 1, 1))
        columns, rows = found = self.arrangement(picture)
        count = rows * columns
        pixels = np.empty((count + (count > 1), height, width, 3), np.uint8)
        pixels[:count] = cut(picture, self.tile, found, self.resample)
        if count > 1:
            pixels[-1] = pixels_of(resized(picture, width, height, self.resample))
        return Tiles(pixels, (len(pixels), rows, columns))

    def sides(self) -> tuple[int, int] | None:
        return self.tile if self.resize or self.most > 1 else None


def check_pixels(name: str, most: int, tile: tuple[int, int]) -> None:
    """Raises RequestError if so many tiles, the value of the field `name`, have too many pixels."""
    if (pixels := most * tile[0] * tile[1]) > MOST_PIXELS:
        raise RequestError(
            f"{name!r} ({most}) allows images of {pixels:,} pixels, more than {MOST_PIXELS:,}",
            parameter=name,
        )


@lru_cache(8)
def arrangements(fewest: int, most: int) -> list[Arrangement]:
    """All arrangements of numbers of tiles, those with fewer tiles first."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(max(1, -(-fewest // columns)), most // columns + 1)
    ]
    return sorted(found, key=lambda each: each[0] * each[1])


def nearest(
    picture: Picture, tile: tuple[int, int], possible: Iterable[Arrangement]
) -> Arrangement:
    """How many tiles an image becomes: those with the nearest ratio of width to height, and of
    several the last ones that have less than twice its pixels, or else the first ones.

    Args:
        picture: an RGB image.
        tile: height and width of a tile, in pixels.
        possible: the possible arrangements.
    """
    width, height = picture.size
    ratio, least, found = width / height, float("inf"), (1, 1)
    for each in possible:
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
    return in_tiles(pixels_of(resized(picture, width * columns, height * rows, resample)), tile)


def in_tiles(whole: NDArray[np.uint8], tile: tuple[int, int]) -> NDArray[np.uint8]:
    """The tiles of an image whose sides are multiples of theirs, row by row.

    Args:
        whole: uint8 [height, width, 3].
        tile: height and width of a tile, in pixels.

    Returns:
        uint8 [tiles, height, width, 3], contiguous.
    """
    height, width = tile
    rows, columns = whole.shape[0] // height, whole.shape[1] // width
    tiles = whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles).reshape(rows * columns, height, width, 3)


def padded(
    picture: Picture, size: tuple[int, int], colour: tuple[int, ...], resample: int
) -> NDArray[np.uint8]:
    """The pixels of an image in the middle of a rectangle, uint8 [height, width, 3], by pillow's
    `ImageOps.pad`.

    Args:
        picture: an RGB image.
        size: height and width of the rectangle, in pixels.
        colour: of the rest of the rectangle, from 0 to 255.
        resample: the filter of pillow.

    Raises:
        RequestError: nothing of the image would remain.
    """
    from PIL import ImageOps

    inside: Any = ImageOps.contain(cast(Any, picture), size[::-1], cast(Any, resample))
    if not min(inside.size):
        raise too_narrow(picture, *inside.size)
    return pixels_of(cast(Any, ImageOps.pad(inside, size[::-1], color=colour)))


def too_narrow(picture: Picture, width: int, height: int) -> RequestError:
    """The error for an image that would have no pixel; the caller raises it."""
    return RequestError(
        f"an image of {picture.size[0]}x{picture.size[1]} pixels is too narrow: it becomes "
        f"{width}x{height} by the model's settings; crop it"
    )


def read_colour(options: Options) -> tuple[int, ...]:
    """The colour in the field "background_color"."""
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
    return tuple(colour)
