"""Idefics3 and SmolVLM: each tile is a run of image tokens behind its row and column, each row ends
with a newline, and the whole image comes last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class Idefics3Placeholder(ImagePlaceholder):
    """Attributes:
    tokens: the number of embeddings of a tile.
    around: the text of the token before each tile, and behind the last one.
    whole: the text before the whole image.
    """

    tokens: int
    around: str
    whole: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = vision.integer("image_size", default=224)
        rows = side // vision.integer("patch_size", default=32)
        text = texts.get("image_token", "<image>")
        token = config.integer("image_token_id", default=128_257, minimum=0)
        return cls(
            **one_token(text, token),
            side=side,
            tokens=rows**2 // config.integer("scale_factor", default=2) ** 2,
            around=texts.get("fake_image_token", "<fake_token_around_image>"),
            whole=texts.get("global_image_token", "<global-img>"),
        )

    def count(self, grid: Grid) -> int:
        return grid[0] * self.tokens

    def expansion(self, item: PreparedItem) -> str:
        _, rows, columns = item.grid
        tokens = self.token * self.tokens
        lines = [
            "".join(f"{self.around}<row_{row}_col_{c}>{tokens}" for c in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        tiles = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        return f"{tiles}{self.around}{self.whole}{tokens}{self.around}"
