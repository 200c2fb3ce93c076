"""Command A Vision's images: resized to the number of square tiles that they are enlarged least
for, and cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.arrangements import ArrangedRules, Arrangement, arrangements
from shmllm.frontend.images.rules.options import Options


@dataclass(frozen=True)
class Cohere2VisionRules(ArrangedRules):
    """The rules of transformers' `Cohere2VisionImageProcessor`, which resizes with torchvision;
    here pillow does. Its "min_patches" has no effect.

    Attributes:
        side: the number of embeddings in a row of a tile.
    """

    side: int

    @classmethod
    def _read(cls, options: Options) -> dict[str, Any]:
        return super()._read(options) | {"side": options.count("patch_size")}

    def arrangement(self, picture: Picture) -> Arrangement:
        """Where all are too small, the one that the image is reduced least for; of several the one
        with the fewest tiles."""
        width, height = picture.size
        possible = arrangements(1, self.most)
        scales = [
            min(columns * self.tile[0] / width, rows * self.tile[0] / height)
            for columns, rows in possible
        ]
        larger = [scale for scale in scales if scale >= 1]
        return possible[scales.index(min(larger) if larger else max(scales))]
