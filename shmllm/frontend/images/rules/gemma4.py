"""Gemma 4's images: of any size, resized to as many embeddings as a budget allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules

BUDGETS = (70, 140, 280, 560, 1120)
"""The possible numbers of an image's embeddings, of which it has at most so many."""
_BUDGET = "max_soft_tokens"


@dataclass(frozen=True, kw_only=True)
class Gemma4Rules(SquaresRules):
    """The rules of transformers' `Gemma4ImageProcessor`.

    Attributes:
        most: the most embeddings of an image.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "resample", _BUDGET})

    most: int

    @classmethod
    def of(cls, options: Options) -> Self:
        most = options.count(_BUDGET)
        if most not in BUDGETS:
            known = ", ".join(map(str, BUDGETS))
            raise RequestError(f"{_BUDGET!r} must be one of {known}, not {most}", parameter=_BUDGET)
        return cls(
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=options.count("pooling_kernel_size"),
            most=most,
        )

    def tiles(self, picture: Picture) -> Tiles:
        tiles = super().tiles(picture)
        count = tiles.grid[1] * tiles.grid[2] // self.merge_size**2
        if count > BUDGETS[-1]:
            raise RequestError(
                f"without 'do_resize' the image has {count:,} embeddings, more than "
                f"{BUDGETS[-1]:,}",
                parameter="do_resize",
            )
        return tiles

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image (transformers'
        `get_aspect_ratio_preserving_size`).

        Raises:
            RequestError: the budget is too small for the image's ratio of sides.
        """
        factor = math.sqrt(self.most * self.factor**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.factor) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return columns * self.factor, rows * self.factor
