"""What the placeholders share of images in tiles of one size: as many embeddings for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class TilesPlaceholder(ImagePlaceholder):
    """Attributes:
    RULES: the rules for images that the model needs.
    AUTHOR: whose image processor they are, for messages.
    tokens: the number of embeddings of a tile.
    """

    RULES: ClassVar[type[Rules]]
    AUTHOR: ClassVar[str]

    tokens: int

    def count(self, grid: Grid) -> int:
        return grid[0] * self.tokens

    def check_rules(self, rules: Rules) -> None:
        if not isinstance(rules, self.RULES):
            raise Config({}).error(
                f"the model needs {self.AUTHOR}'s image processor, not {rules!r}"
            )
