"""Pixtral's images: reduced to a longest edge if they exceed it, and then enlarged to multiples of
merged patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.rules.family import Grid
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED
from shmllm.frontend.images.rules.squares import SquaresRules

_LONGEST = ("longest_edge",)


@dataclass(frozen=True, kw_only=True)
class PixtralRules(SquaresRules):
    """The rules of transformers' `PixtralImageProcessor` within a `PixtralProcessor`.

    Attributes:
        most: the largest width and height that an image keeps, in pixels.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "size", "resample"})

    most: tuple[int, int]

    @classmethod
    def of(cls, options: Options) -> Self:
        if options.flag("do_center_crop"):
            raise RequestError("'do_center_crop' is not supported", parameter="do_center_crop")
        size = options.sides("size", _LONGEST, FIXED)
        patch = options.sides("patch_size", FIXED)
        if patch["height"] != patch["width"]:
            raise RequestError(
                f"'patch_size' must be a square, not {patch!r}", parameter="patch_size"
            )
        longest = size.get("longest_edge", 0)
        return cls(
            most=(size.get("width", longest), size.get("height", longest)),
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=patch["width"],
            merge_size=options.count("spatial_merge_size"),
        )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image.

        Raises:
            RequestError: the shorter side of the reduced image has no pixel.
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
        return self._up(sides[0]), self._up(sides[1])

    def largest(self) -> Grid | None:
        if not self.resize:
            return None
        columns, rows = (self._up(side) // self.patch_size for side in self.most)
        return (1, rows, columns)

    def _up(self, side: int) -> int:
        return math.ceil(side / self.factor) * self.factor
