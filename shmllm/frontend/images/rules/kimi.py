"""Kimi's images: reduced if they have too many patches, and filled up with black at the right and
at the bottom to multiples of merged patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, resized
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules

_SIDES = ("max_height", "max_width")
_LONGEST = 512
"""More patches than a row and a column of Kimi-VL have."""


@dataclass(frozen=True, kw_only=True)
class KimiRules(SquaresRules):
    """The rules of transformers' `Kimi_K25ImageProcessor`, and of the authors' class.

    Attributes:
        most: the largest number of patches that an image keeps, about.
        longest: the most of them in a row and in a column.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "max_patches", "resample"})

    most: int
    longest: int

    @classmethod
    def of(cls, options: Options) -> Self:
        sides = options.sides("size", _SIDES)
        if len({*sides.values()}) > 1:
            raise RequestError(f"'size' must be a square, not {sides!r}", parameter="size")
        return cls(
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=options.count("merge_size"),
            most=options.count("max_patches"),
            longest=sides["max_height"],
        )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the reduced image, before it is filled up."""
        patch, longest = self.patch_size, self.longest * self.patch_size
        count = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.most / count), longest / height, longest / width)
        columns, rows = (max(1, int(side * scale)) for side in (width, height))
        return min(columns, longest), min(rows, longest)

    def fitted(self, picture: Picture, size_of: Callable[[int, int], tuple[int, int]]) -> Picture:
        if not self.resize:
            return super().fitted(picture, size_of)
        from PIL import Image

        reduced = resized(picture, *size_of(*picture.size), self.resample)
        width, height = (math.ceil(side / self.factor) * self.factor for side in reduced.size)
        if reduced.size == (width, height):
            return reduced
        filled: Any = Image.new("RGB", (width, height))
        filled.paste(reduced, (0, 0))
        found: Picture = filled
        return found


@dataclass(frozen=True, kw_only=True)
class KimiVLRules(KimiRules):
    """The rules of the image processor that the authors of Kimi-VL publish."""

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"in_token_limit"})

    @classmethod
    def of(cls, options: Options) -> Self:
        if not options.flag("pad_input"):
            raise RequestError(
                "'pad_input' false is not supported; supported: true", parameter="pad_input"
            )
        merge = options.values.get("merge_kernel_size")
        if not isinstance(merge, list | tuple) or len(merge) != 2 or merge[0] != merge[1]:
            raise RequestError(
                f"'merge_kernel_size' must have two equal numbers, not {merge!r}",
                parameter="merge_kernel_size",
            )
        return cls(
            resize=True,
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=Options({"merge_kernel_size": merge[0]}).count("merge_kernel_size"),
            most=options.count("in_token_limit"),
            longest=_LONGEST,
        )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        patch = self.patch_size
        count = (width // patch) * (height // patch)
        if count > self.most:
            scale = math.sqrt(self.most / count)
            width, height = int(width * scale), int(height * scale)
        filled = [math.ceil(side / self.factor) * self.factor // patch for side in (width, height)]
        if min(width, height) == 0 or max(filled) >= self.longest:
            raise RequestError(
                f"an image of {filled[0]}x{filled[1]} patches is too narrow: a row and a column "
                f"have at most {self.longest - 1}; crop it"
            )
        return width, height
