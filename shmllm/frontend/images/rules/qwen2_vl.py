"""Qwen-VL's images: their own ratio, sides that are multiples of merged patches, and a number of
pixels between two bounds. Qwen2-VL, 2.5-VL and 3-VL differ in the settings only.

The grid is (1, rows, columns) of patches before they are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Grid, Rules, Tiles
from shmllm.frontend.images.rules.options import Options

LARGEST_RATIO = 200
"""The largest ratio of an image's sides, as in transformers."""

_BOUNDS = ("shortest_edge", "longest_edge")


@dataclass(frozen=True)
class Qwen2VLRules(Rules):
    """The rules of transformers' `Qwen2VLImageProcessor`.

    Attributes:
        fewest: the smallest number of pixels of a resized image.
        most: the largest one.
        resize: whether images are resized; otherwise their sides must suit.
        resample: the filter of pillow.
        patch_size: the side of a patch, in pixels.
        merge_size: the side of the square of patches that becomes one embedding, in patches.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_resize", "size", "min_pixels", "max_pixels", "resample"}
    )

    fewest: int
    most: int
    resize: bool
    resample: int
    patch_size: int
    merge_size: int

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """All bounds of pixels are in "size" afterwards. A request may change one of them, and both
        kinds of fields may name them min_pixels and max_pixels, which then count."""
        size = values.get("size")
        for fields in (values, changes):
            given = fields.get("size")
            if isinstance(given, dict) and isinstance(size, dict):
                size = size | given
            elif given is not None:
                size = given
            for name, bound in zip(("min_pixels", "max_pixels"), _BOUNDS, strict=True):
                if fields.get(name) is not None and isinstance(size, dict):
                    size = size | {bound: fields[name]}
        return values | changes | {"size": size}

    @classmethod
    def of(cls, options: Options) -> Self:
        bounds = options.sides("size", _BOUNDS)
        return cls(
            fewest=bounds["shortest_edge"],
            most=bounds["longest_edge"],
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=options.count("merge_size"),
        )

    def tiles(self, picture: Picture) -> Tiles:
        picture = self.fitted(picture, self.size_of)
        width, height = picture.size
        grid = (1, height // self.patch_size, width // self.patch_size)
        return Tiles(pixels_of(picture)[None], grid)

    def fitted(self, picture: Picture, size_of: Callable[[int, int], tuple[int, int]]) -> Picture:
        """The image in a size that the model takes.

        Args:
            picture: an RGB image.
            size_of: makes that size of the image's, width and height.

        Raises:
            RequestError: without `resize`, its size does not suit.
        """
        if self.resize:
            picture = resized(picture, *size_of(*picture.size), self.resample)
        width, height = picture.size
        if width % self.factor or height % self.factor:
            raise RequestError(
                f"without 'do_resize' both sides must be multiples of {self.factor} pixels, not "
                f"{width}x{height}",
                parameter="do_resize",
            )
        return picture

    @property
    def factor(self) -> int:
        """The side of an embedding, in pixels."""
        return self.patch_size * self.merge_size

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image (transformers' `smart_resize`). Of a half, Python
        rounds to the even number.

        Raises:
            RequestError: one side is more than LARGEST_RATIO times the other.
        """
        if max(width, height) / min(width, height) > LARGEST_RATIO:
            raise RequestError(
                f"an image of {width}x{height} pixels is too narrow: one side may be at most "
                f"{LARGEST_RATIO} times the other; crop it"
            )
        factor = self.factor
        sides = [round(side / factor) * factor for side in (width, height)]
        area = sides[0] * sides[1]
        if area > self.most:
            scale = math.sqrt(height * width / self.most)
            sides = [max(1, math.floor(s / scale / factor)) * factor for s in (width, height)]
        elif area < self.fewest:
            scale = math.sqrt(self.fewest / (height * width))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return sides[0], sides[1]

    def largest(self) -> Grid | None:
        """An upper bound. A side that is raised to one factor, or rounded up at the lower bound,
        makes areas above `most`; both are worst for the narrowest images."""
        if not self.resize:
            return None
        factor, ratio = self.factor, math.sqrt(LARGEST_RATIO)
        raised = factor * math.sqrt(self.most) * ratio
        rounded = self.fewest + factor * math.sqrt(self.fewest) * (ratio + 1 / ratio) + factor**2
        area = max(self.most, math.ceil(raised), math.ceil(rounded))
        return (1, self.merge_size, self.merge_size * (area // factor**2))
