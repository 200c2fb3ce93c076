"""LLaVA-NeXT's images: one tile has the whole image, the others a larger one with padding, cut row
by row. The grid is (tiles, height, width), the latter of the image itself, in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.formats.joined_tiles import Size, best_size, read_sizes
from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED, SHORTEST

_SIZES = "image_grid_pinpoints"


@dataclass(frozen=True)
class LlavaNextRules(Rules):
    """The rules of transformers' `LlavaNextImageProcessor`. As tiles have the sides that it resizes
    and crops them to, it is the same whether it does.

    Attributes:
        tile: the side of a tile, in pixels.
        sizes: the possible sizes of the larger image, multiples of `tile`.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"resample"})

    tile: int
    sizes: tuple[Size, ...]
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        size = options.sides("size", SHORTEST, FIXED, one="shortest_edge")
        crop = options.sides("crop_size", FIXED) if "crop_size" in options.values else {}
        sides = {*size.values(), *crop.values()}
        if len(sides) > 1:
            raise RequestError(
                f"'crop_size' ({crop!r}) must be a square of the sides of 'size' ({size!r})",
                parameter="crop_size",
            )
        (tile,) = sides
        sizes = _sizes(options, tile)
        return cls(tile=tile, sizes=sizes, resample=options.filter(), **cls._further(options))

    @classmethod
    def _further(cls, options: Options) -> dict[str, Any]:
        """The attributes that a subclass has beside these."""
        return {}

    def tiles(self, picture: Picture) -> Tiles:
        width, height = picture.size
        size = best_size(height, width, self.sizes)
        rows, columns = (side // self.tile for side in size)
        pixels = np.empty((1 + rows * columns, self.tile, self.tile, 3), np.uint8)
        pixels[0] = pixels_of(resized(picture, self.tile, self.tile, self.resample))
        pixels[1:].reshape(rows, columns, self.tile, self.tile, 3)[...] = (
            self._padded(picture, size)
            .reshape(rows, self.tile, columns, self.tile, 3)
            .swapaxes(1, 2)
        )
        return Tiles(pixels, (len(pixels), height, width))

    def sides(self) -> tuple[int, int]:
        return self.tile, self.tile

    def _padded(self, picture: Picture, size: Size) -> np.ndarray:
        """The image in the largest sides that fit into `size`, in the middle of black pixels, uint8
        [height, width, 3]."""
        width, height = picture.size
        by_width, by_height = size[1] / width, size[0] / height
        if by_width < by_height:
            sides = min(math.ceil(height * by_width), size[0]), size[1]
        else:
            sides = size[0], min(math.ceil(width * by_height), size[1])
        padded = np.zeros((*size, 3), np.uint8)
        top, left = (size[0] - sides[0]) // 2, (size[1] - sides[1]) // 2
        padded[top : top + sides[0], left : left + sides[1]] = pixels_of(
            resized(picture, sides[1], sides[0], self.resample)
        )
        return padded


def _sizes(options: Options, tile: int) -> tuple[Size, ...]:
    """The sizes in a file, each a list of height and width."""
    value = options.values.get(_SIZES)
    sizes = read_sizes(value, tile)
    if sizes is None:
        raise RequestError(
            f"{_SIZES!r} must list heights and widths that are multiples of a tile's {tile} "
            f"pixels, not {value!r}",
            parameter=_SIZES,
        )
    return sizes
