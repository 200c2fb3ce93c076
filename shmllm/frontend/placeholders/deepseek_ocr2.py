"""DeepSeek-OCR and DeepSeek-OCR 2: the embeddings of all tiles of an image, of the whole and one
more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.deepseek_ocr2 import DeepseekOcr2Rules, DeepseekOcrRules
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, ImagePlaceholder, one_token
from shmllm.params.items import Grid

_WHOLE, _SQUARE = 64, 4
"""The patches of a row of the whole, and of those that one embedding stands for."""


@dataclass(frozen=True, kw_only=True)
class DeepseekOcr2Placeholder(ImagePlaceholder):
    """Attributes:
    patch_size: the side of a patch, in pixels.
    TILE: the patches of a row of a tile.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = DeepseekOcr2Rules
    AUTHOR: ClassVar[str] = "DeepSeek-OCR 2"
    TILE: ClassVar[int] = 48

    patch_size: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        token = config.integer("image_token_id", default=128_815, minimum=0)
        sam = config.table("vision_config").table("sam_config")
        return cls(
            **one_token(texts.get("image_token", "<image>"), token),
            side=None,
            patch_size=sam.integer("patch_size", default=16),
        )

    def adapted(self, settings: ImageSettings) -> ImageSettings:
        """The processor cuts images into so many tiles whatever the image processor's file says."""
        return settings.with_options(crop_to_patches=True, min_patches=2, max_patches=6)

    def check_rules(self, rules: Rules) -> None:
        super().check_rules(rules)
        assert isinstance(rules, DeepseekOcr2Rules)
        needed = self.TILE * self.patch_size, _WHOLE * self.patch_size
        if (found := (rules.tile, rules.whole)) != needed:
            raise Config({}).error(
                f"the vision tower takes tiles of {needed[0]} and whole images of {needed[1]} "
                f"pixels, and the image processor makes {found[0]} and {found[1]}: change its "
                "settings"
            )

    def count(self, grid: Grid) -> int:
        if grid[1:] == (0, 0):
            return (_WHOLE // _SQUARE) ** 2 + 1
        return grid[0] * (self.TILE // _SQUARE) ** 2

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens


@dataclass(frozen=True, kw_only=True)
class DeepseekOcrPlaceholder(DeepseekOcr2Placeholder):
    """DeepSeek-OCR, of which one more embedding ends each row."""

    RULES: ClassVar[type[Rules]] = DeepseekOcrRules
    AUTHOR: ClassVar[str] = "DeepSeek-OCR"
    TILE: ClassVar[int] = 40

    def count(self, grid: Grid) -> int:
        _, rows, columns = grid
        if (rows, columns) == (0, 0):
            return _WHOLE // _SQUARE * (_WHOLE // _SQUARE + 1) + 1
        side = self.TILE // _SQUARE
        return side * rows * (side * columns + 1)
