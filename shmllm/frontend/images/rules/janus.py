"""Janus's images: the longer side becomes that of the tile, and a colour fills up the other one.

The grid is (1, 1, 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED, in_square, mean_colour


@dataclass(frozen=True)
class JanusRules(Rules):
    """The rules of transformers' `JanusImageProcessor`.

    Attributes:
        side: that of the tile, in pixels.
        least: the shortest side of a resized image.
        resample: the filter of pillow.
        background: the colour around an image that is not square, from 0 to 255.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"min_size", "resample"})

    side: int
    least: int
    resample: int
    background: tuple[int, ...]

    @classmethod
    def of(cls, options: Options) -> Self:
        for name in ("do_resize", "do_pad"):
            if not options.flag(name):
                raise RequestError(f"{name!r} must be true", parameter=name)
        size = options.sides("size", FIXED)
        if size["height"] != size["width"]:
            raise RequestError(f"'size' must be a square, not {size!r}", parameter="size")
        least = options.count("min_size")
        if least > size["height"]:
            raise RequestError(
                f"'min_size' must be at most {size['height']}, not {least}", parameter="min_size"
            )
        return cls(size["height"], least, options.filter(), mean_colour(options))

    def tiles(self, picture: Picture) -> Tiles:
        scale = self.side / max(picture.size)
        width, height = (max(round(side * scale), self.least) for side in picture.size)
        square = in_square(resized(picture, width, height, self.resample), self.background)
        return Tiles(pixels_of(square)[None], (1, 1, 1))

    def sides(self) -> tuple[int, int] | None:
        return self.side, self.side
