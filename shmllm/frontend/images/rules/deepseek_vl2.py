"""DeepSeek-VL2's images: the whole in the middle of a tile, and then the picture, in the middle of
the size of several tiles that suits it best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.formats.deepseek_vl2 import SIZES
from shmllm.formats.joined_tiles import Size, best_size, read_sizes
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.arrangements import check_pixels, in_tiles, padded, read_colour
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED

_CUTS = "cropping"
_MOST_CUT = 2


@dataclass(frozen=True)
class DeepseekVL2Rules(Rules):
    """The rules of the authors' `DeepseekVLV2Processor`. The grid is (1 + tiles, rows, columns).

    Attributes:
        tile: the side of a tile, in pixels.
        sizes: those of a picture; one tile if images are not cut, as among several images.
        background: the colour around an image, from 0 to 255.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({_CUTS, "resample"})

    tile: int
    sizes: tuple[Size, ...]
    background: tuple[int, ...]
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        tile = options.sides("size", FIXED)["height"]
        listed: Any = options.values.get(SIZES)
        sizes = read_sizes(listed, tile)
        if sizes is None:
            raise RequestError(
                f"{SIZES!r} must list widths and heights of whole tiles of {tile} pixels, not "
                f"{listed!r}",
                parameter=SIZES,
            )
        most = max(width * height for width, height in sizes) // tile**2
        check_pixels(SIZES, most, (tile, tile))
        return cls(
            tile=tile,
            sizes=tuple((height, width) for width, height in sizes)
            if options.flag(_CUTS)
            else ((tile, tile),),
            background=read_colour(options),
            resample=options.filter(),
        )

    @classmethod
    def among(cls, count: int) -> Mapping[str, Any]:
        return {_CUTS: False} if count > _MOST_CUT else {}

    def tiles(self, picture: Picture) -> Tiles:
        sides = self.tile, self.tile
        size = best_size(picture.size[1], picture.size[0], self.sizes)
        whole = padded(picture, sides, self.background, self.resample)
        tiles = in_tiles(padded(picture, size, self.background, self.resample), sides)
        pixels = np.concatenate([whole[None], tiles])
        return Tiles(pixels, (len(pixels), size[0] // self.tile, size[1] // self.tile))

    def sides(self) -> tuple[int, int] | None:
        return self.tile, self.tile
