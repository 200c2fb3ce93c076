"""DeepSeek-VL2: the embeddings of the whole image, of the picture that its tiles make up, and those
behind their rows and between both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.deepseek_vl2 import FACTOR, PATCH_SIZE, TILE_SIZE
from shmllm.frontend.images.rules.deepseek_vl2 import DeepseekVL2Rules
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, ImagePlaceholder, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class DeepseekVL2Placeholder(ImagePlaceholder):
    """Attributes:
    row: the number of embeddings of a row of a tile, and of its rows.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = DeepseekVL2Rules
    AUTHOR: ClassVar[str] = "DeepSeek-VL2"

    row: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = vision.integer("image_size", default=TILE_SIZE)
        patches = side // vision.integer("patch_size", default=PATCH_SIZE)
        factor = config.table("projector_config").integer("downsample_ratio", default=FACTOR)
        token = config.integer("image_token_id", minimum=0)
        return cls(
            **one_token(texts.get("image_token", "<image>"), token),
            side=side,
            row=-(-patches // factor),
        )

    def count(self, grid: Grid) -> int:
        _, rows, columns = grid
        return self.row * (self.row + 1 + rows * (self.row * columns + 1)) + 1

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
