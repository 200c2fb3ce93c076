"""Ovis 2's images: resized to a number of square tiles that leaves little of the image without
pixels, and cut; the whole image is the first tile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.arrangements import Arrangement, arrangements
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.internvl import InternVLRules
from shmllm.frontend.images.rules.options import Options

_COVERED = 0.9


@dataclass(frozen=True)
class Ovis2Rules(InternVLRules):
    """The rules of transformers' `Ovis2ImageProcessor`.

    Attributes:
        covers: whether tiles are chosen by how much of the image they cover; otherwise as for
            InternVL.
    """

    OVERRIDES: ClassVar[frozenset[str]] = InternVLRules.OVERRIDES | {"use_covering_area_grid"}

    covers: bool

    @classmethod
    def _read(cls, options: Options) -> dict[str, Any]:
        read = super()._read(options)
        if options.flag("do_center_crop"):
            raise RequestError("'do_center_crop' is not supported", parameter="do_center_crop")
        return read | {"covers": options.flag("use_covering_area_grid")}

    def tiles(self, picture: Picture) -> Tiles:
        found = super().tiles(picture)
        return Tiles(np.roll(found.pixels, 1, axis=0), found.grid)

    def arrangement(self, picture: Picture) -> Arrangement:
        """The fewest tiles that cover more than nine tenths of the image, or else those that cover
        most of it; of several the ones that cover more, or have fewer tiles."""
        if not self.covers:
            return super().arrangement(picture)
        width, height = picture.size
        shares = {
            each: _covered(width, height, each, self.tile[0]) / (width * height)
            for each in arrangements(1, self.most)
        }
        enough = [each for each, share in shares.items() if share > _COVERED]
        if enough:
            return min(enough, key=lambda each: (each[0] * each[1], -shares[each]))
        return min(shares, key=lambda each: (-shares[each], each[0] * each[1]))


def _covered(width: int, height: int, grid: Arrangement, side: int) -> float:
    """The area of an image that its parts keep if each is reduced to a square; the grid is read as
    rows and columns, as transformers does it."""
    rows, columns = grid
    return sum(  # in this order, which decides between arrangements that are nearly alike
        _kept(right - left, bottom - top, side)
        for top, bottom in pairwise(_edges(height, rows))
        for left, right in pairwise(_edges(width, columns))
    )


def _kept(width: int, height: int, side: int) -> float:
    long, short = max(width, height), min(width, height)
    return side * (short / long * side) if long > side else long * short


def _edges(length: int, count: int) -> list[int]:
    """The edges of so many equal parts, of which the last one has the rest, too."""
    return [*(index * (length // count) for index in range(count)), length]
