"""Gemma 3's images: resized to fixed sides; with pan and scan, crops of a long image follow, each
resized alike. The grid is (1 + crops, 1, 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED, fixed_sides, resized_to

_CROPPING = (
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)


@dataclass(frozen=True)
class Gemma3Rules(Rules):
    """The rules of transformers' `Gemma3ImageProcessor`.

    Attributes:
        size: the sides of the resized image, in pixels; None if it keeps its size.
        resample: the filter of pillow.
        most_crops: the largest number of crops; 0 without pan and scan.
        smallest_crop: the shortest side of a crop, in pixels of the image.
        smallest_ratio: the ratio of the sides from which on there are crops.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_resize", "size", "resample", "do_pan_and_scan", *_CROPPING}
    )

    size: dict[str, int] | None
    resample: int
    most_crops: int
    smallest_crop: int
    smallest_ratio: float

    @classmethod
    def of(cls, options: Options) -> Self:
        size = options.sides("size", FIXED)
        smallest, most = options.count(_CROPPING[0]), options.count(_CROPPING[1])
        return cls(
            size=size if options.flag("do_resize") else None,
            resample=options.filter(),
            most_crops=most if options.flag("do_pan_and_scan") else 0,
            smallest_crop=smallest,
            smallest_ratio=options.number(_CROPPING[2]),
        )

    def tiles(self, picture: Picture) -> Tiles:
        pictures = [picture, *self._crops(picture)]
        if self.size is not None:
            pictures = [resized_to(each, self.size, self.resample) for each in pictures]
        if len({each.size for each in pictures}) > 1:
            raise RequestError(
                "'do_pan_and_scan' needs 'do_resize', as crops have other sides than the image",
                parameter="do_resize",
            )
        if len(pictures) == 1:
            return Tiles(pixels_of(pictures[0])[None], (1, 1, 1))
        pixels = np.stack([pixels_of(each) for each in pictures])
        return Tiles(pixels, (len(pictures), 1, 1))

    def sides(self) -> tuple[int, int] | None:
        return fixed_sides(self.size)

    def _crops(self, picture: Picture) -> list[Picture]:
        """Equal parts of the longer side, none if the image is nearly square or too small. The last
        part has what is left."""
        width, height = picture.size
        longer, shorter = max(width, height), min(width, height)
        if not self.most_crops or longer / shorter < self.smallest_ratio:
            return []
        number = min(longer // self.smallest_crop, math.floor(longer / shorter + 0.5))
        number = min(self.most_crops, max(2, number))
        part = math.ceil(longer / number)
        if min(part, shorter) < self.smallest_crop:
            return []
        if (number - 1) * part >= longer:
            raise RequestError(
                f"'do_pan_and_scan' cannot cut an image of {width}x{height} pixels into {number} "
                f"crops; raise {_CROPPING[0]!r}",
                parameter=_CROPPING[0],
            )
        bounds = [(start, min(start + part, longer)) for start in range(0, longer, part)]
        if width >= height:
            return [picture.crop((start, 0, end, height)) for start, end in bounds]
        return [picture.crop((0, start, width, end)) for start, end in bounds]
