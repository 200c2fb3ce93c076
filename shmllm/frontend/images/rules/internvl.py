"""The images of InternVL, Aya Vision and GOT-OCR 2: resized to the number of square tiles whose
ratio is nearest, and cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.arrangements import (
    ArrangedRules,
    Arrangement,
    arrangements,
    nearest,
)
from shmllm.frontend.images.rules.options import Options


@dataclass(frozen=True)
class InternVLRules(ArrangedRules):
    """The rules of transformers' `GotOcr2ImageProcessor`.

    Attributes:
        fewest: the smallest number of tiles, without that of the whole image.
    """

    OVERRIDES: ClassVar[frozenset[str]] = ArrangedRules.OVERRIDES | {"min_patches"}

    fewest: int

    @classmethod
    def _read(cls, options: Options) -> dict[str, Any]:
        return super()._read(options) | {"fewest": options.count("min_patches")}

    def arrangement(self, picture: Picture) -> Arrangement:
        return nearest(picture, self.tile, arrangements(self.fewest, self.most))
