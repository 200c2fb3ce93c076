"""SigLIP 2's images of any size: resized to the most patches that their ratio allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.formats.siglip2 import MOST_PATCHES
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules

_LARGEST_SCALE = 100.0
_TOLERANCE = 1e-5
"""Of the scale, as in transformers' `get_image_size_for_max_num_patches`."""


@dataclass(frozen=True, kw_only=True)
class Siglip2Rules(SquaresRules):
    """The rules of transformers' `Siglip2ImageProcessor`.

    Attributes:
        most: the largest number of patches.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "max_num_patches", "resample"})

    most: int

    @classmethod
    def of(cls, options: Options) -> Self:
        most = options.count("max_num_patches")
        if most > MOST_PATCHES:
            raise RequestError(
                f"'max_num_patches' must be at most {MOST_PATCHES}, not {most}",
                parameter="max_num_patches",
            )
        return cls(
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=1,
            most=most,
        )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image: of scales between which a search halves, the
        largest one whose patches are not too many."""
        low, high = _TOLERANCE / 10, _LARGEST_SCALE
        while high - low >= _TOLERANCE:
            middle = (low + high) / 2
            if self._patches(width, middle) * self._patches(height, middle) <= self.most:
                low = middle
            else:
                high = middle
        columns, rows = self._patches(width, low), self._patches(height, low)
        return columns * self.patch_size, rows * self.patch_size

    def _patches(self, side: int, scale: float) -> int:
        return max(1, math.ceil(side * scale / self.patch_size))
