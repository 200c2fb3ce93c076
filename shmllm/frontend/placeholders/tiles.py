"""What the placeholders share of images in tiles of one size: as many embeddings for each."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.frontend.placeholders.family import ImagePlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class TilesPlaceholder(ImagePlaceholder):
    """Attributes:
    tokens: the number of embeddings of a tile.
    """

    tokens: int

    def count(self, grid: Grid) -> int:
        return grid[0] * self.tokens
