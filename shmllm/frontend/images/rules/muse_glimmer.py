"""Muse Glimmer's images: in the size of whole squares of patches, few enough of them, whose ratio
is nearest to the image's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Self

from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerRules(SquaresRules):
    """The rules of transformers' `MuseGlimmerImageProcessor`.

    Attributes:
        LIMIT: the field with the value of `most`.
        most: the largest number of embeddings of an image.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "max_image_tokens", "resample"})
    LIMIT: ClassVar[str] = "max_image_tokens"

    most: int

    @classmethod
    def of(cls, options: Options) -> Self:
        return cls(
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=options.count("merge_size"),
            most=options.count(cls.LIMIT),
        )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image (transformers' `smart_resize`)."""
        rows, columns = height / self.factor, width / self.factor
        if rows * columns > self.most:
            ratio = columns / rows
            rows = math.sqrt(self.most / ratio)
            columns = rows * ratio
        near = [[math.floor(count), math.ceil(count)] for count in (rows, columns)]
        # Of equally near ratios the first one of a set counts.
        fitting = [each for each in {*product(*near)} if min(each) >= 1 and self._fits(*each)]
        if fitting:
            found = min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        else:
            found = max(1, round(rows)), max(1, round(columns))
        return found[1] * self.factor, found[0] * self.factor

    def _fits(self, rows: int, columns: int) -> bool:
        return rows * columns <= self.most


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerFrameRules(MuseGlimmerRules):
    """The same for frames of videos."""

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_resize", "max_video_frame_tokens", "resample"}
    )
    LIMIT: ClassVar[str] = "max_video_frame_tokens"
