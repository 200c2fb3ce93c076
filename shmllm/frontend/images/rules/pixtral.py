"""Pixtral's images: reduced to a longest edge if they exceed it, and then enlarged to multiples of
merged patches, or of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED
from shmllm.frontend.images.rules.squares import SquaresRules

_LONGEST = ("longest_edge",)
STEP = "step"
"""The option with the multiple that sides have; without it they are multiples of merged patches."""


@dataclass(frozen=True, kw_only=True)
class PixtralRules(SquaresRules):
    """The rules of transformers' `PixtralImageProcessor` within a `PixtralProcessor`.

    Attributes:
        most: the largest width and height that an image keeps, in pixels.
        multiple: the number of pixels of which sides are multiples.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "size", "resample"})

    most: tuple[int, int]
    multiple: int

    @classmethod
    def of(cls, options: Options) -> Self:
        if options.flag("do_center_crop"):
            raise RequestError("'do_center_crop' is not supported", parameter="do_center_crop")
        size = options.sides("size", _LONGEST, FIXED)
        longest = size.get("longest_edge", 0)
        patch_size, merge_size = _square(options, "patch_size"), options.count("spatial_merge_size")
        multiple = _square(options, STEP) if STEP in options.values else patch_size * merge_size
        if multiple % patch_size:
            raise RequestError(
                f"the image processor's 'patch_size' ({multiple}) must be a multiple of the "
                f"processor's ({patch_size})",
                parameter="patch_size",
            )
        return cls(
            most=(size.get("width", longest), size.get("height", longest)),
            multiple=multiple,
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=patch_size,
            merge_size=merge_size,
        )

    @property
    def step(self) -> int:
        return self.multiple

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image.

        Raises:
            RequestError: the shorter side of the reduced image has no pixel, or no merged patch.
        """
        ratio = max(height / self.most[1], width / self.most[0])
        sides = width, height
        if ratio > 1:
            sides = math.floor(width / ratio), math.floor(height / ratio)
        if 0 in sides:
            raise RequestError(
                f"an image of {width}x{height} pixels is too narrow: it is reduced to "
                f"{sides[0]}x{sides[1]} by the model's settings; crop it"
            )
        width, height = self._up(sides[0]), self._up(sides[1])
        if min(width, height) < self.factor:
            raise RequestError(
                f"the image becomes {width}x{height} pixels by the model's settings, and each side "
                f"must have {self.factor} at least; enlarge it"
            )
        return width, height

    def _up(self, side: int) -> int:
        return math.ceil(side / self.step) * self.step


def _square(options: Options, name: str) -> int:
    sides = options.sides(name, FIXED)
    if sides["height"] != sides["width"]:
        raise RequestError(f"{name!r} must be a square, not {sides!r}", parameter=name)
    return sides["width"]
