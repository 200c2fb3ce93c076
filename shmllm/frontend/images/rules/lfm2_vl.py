"""LFM2-VL's images: resized to a number of pixels between two bounds. A larger one is cut into
square tiles whose ratio is nearest, and the resized image is one more part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import MOST_PIXELS, Picture
from shmllm.frontend.images.rules.arrangements import Arrangement, cut, nearest
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules

_TILES = ("min_tiles", "max_tiles")


@dataclass(frozen=True, kw_only=True)
class Lfm2VlRules(SquaresRules):
    """The rules of transformers' `Lfm2VlImageProcessor` within an `Lfm2VlProcessor`, which resizes
    with torchvision, always; here pillow does.

    Attributes:
        fewest: the smallest number of embeddings of an image that is not cut.
        most: the largest one.
        tolerance: how many times the pixels of the latter an image may have and is not cut.
        tile: the side of a tile, in pixels.
        num_tiles: the smallest and the largest number of tiles; None: no image is cut.
        thumbnail: whether an image that is cut is there as a whole, too.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_image_splitting", "max_image_tokens", "max_pixels_tolerance", "max_tiles"}
        | {"min_image_tokens", "min_tiles", "resample", "tile_size", "use_thumbnail"}
    )

    fewest: int
    most: int
    tolerance: float
    tile: int
    num_tiles: tuple[int, int] | None
    thumbnail: bool

    @classmethod
    def of(cls, options: Options) -> Self:
        if not options.flag("use_image_special_tokens"):
            raise RequestError(
                "'use_image_special_tokens' false is not supported",
                parameter="use_image_special_tokens",
            )
        rules = cls(
            resize=True,
            resample=options.filter(),
            patch_size=options.count("encoder_patch_size"),
            merge_size=options.count("downsample_factor"),
            fewest=options.count("min_image_tokens"),
            most=options.count("max_image_tokens"),
            tolerance=options.number("max_pixels_tolerance"),
            tile=options.count("tile_size"),
            num_tiles=_read_num_tiles(options),
            thumbnail=options.flag("use_thumbnail"),
        )
        if rules.tile % rules.factor:
            raise RequestError(
                f"'tile_size' must be a multiple of {rules.factor}, not {rules.tile}",
                parameter="tile_size",
            )
        if rules.num_tiles is not None and rules.num_tiles[1] * rules.tile**2 > MOST_PIXELS:
            raise RequestError(
                f"'max_tiles' ({rules.num_tiles[1]}) allows images of more than {MOST_PIXELS:,} "
                "pixels",
                parameter="max_tiles",
            )
        return rules

    def tiles(self, picture: Picture) -> Tiles:
        if self.num_tiles is None or not self._is_large(*picture.size):
            return super().tiles(picture)
        tile = self.tile, self.tile
        found = nearest(picture, tile, _arrangements(*self.num_tiles))
        columns, rows = found
        side = self.tile // self.patch_size
        pixels = cut(picture, tile, found, self.resample)
        parts = [Tiles(each[None], (1, side, side)) for each in pixels]
        if self.thumbnail:
            parts.append(super().tiles(picture))
        return Tiles(np.empty(0, np.uint8), (len(parts), rows, columns), tuple(parts))

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image (transformers' `smart_resize`). Of a half, Python
        rounds to the even number."""
        fewest, most = (count * self.factor**2 for count in (self.fewest, self.most))
        sides = width, height
        found = [max(1, round(side / self.factor)) * self.factor for side in sides]
        if found[0] * found[1] > most:
            scale = math.sqrt(width * height / most)
            found = [max(1, math.floor(side / scale / self.factor)) * self.factor for side in sides]
        elif found[0] * found[1] < fewest:
            scale = math.sqrt(fewest / (width * height))
            found = [math.ceil(side * scale / self.factor) * self.factor for side in sides]
        return found[0], found[1]

    def _is_large(self, width: int, height: int) -> bool:
        sides = (
            max(self.patch_size, round(side / self.factor) * self.factor)
            for side in (width, height)
        )
        return math.prod(sides) > self.most * self.factor**2 * self.tolerance


def _read_num_tiles(options: Options) -> tuple[int, int] | None:
    fewest, most = (options.count(name) for name in _TILES)
    if not options.flag("do_image_splitting") or (fewest, most) == (1, 1):
        return None
    if not 1 < fewest <= most:
        raise RequestError(
            f"'min_tiles' must be from 2 to 'max_tiles' ({most}), not {fewest}",
            parameter="min_tiles",
        )
    return fewest, most


@lru_cache(8)
def _arrangements(fewest: int, most: int) -> list[Arrangement]:
    """All arrangements, those with fewer tiles first. transformers takes those with equally many in
    the order that Python's set has them in, and so does this: it adds them in the same order."""
    found = {
        (columns, rows)
        for columns in range(1, fewest + 1)
        for rows in range(-(-fewest // columns), min(fewest, most // columns) + 1)
    }
    for longer in range(fewest + 1, most + 1):
        others = range(1, min(longer, most // longer) + 1)
        found.update((columns, longer) for columns in others)
        found.update((longer, rows) for rows in others)
    return sorted(found, key=lambda each: each[0] * each[1])
