"""HunyuanOCR: an image token for each square of merged patches, one for the end of each row, and
two for those of the image, between two others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.hunyuan_vl import HunYuanVLRules
from shmllm.frontend.placeholders.family import Beside, Config, TokenIds
from shmllm.frontend.placeholders.qwen_vl import QwenVLPlaceholder, TokenTexts
from shmllm.params.items import Grid

_WITHOUT_ENDS = "cat_extra_token"


@dataclass(frozen=True, kw_only=True)
class HunYuanVLPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `HunYuanVLConfig`."""

    EMBEDS: ClassVar[Beside | None] = None
    RULES: ClassVar[type[Rules]] = HunYuanVLRules
    AUTHOR: ClassVar[str] = "HunyuanOCR"
    DEFAULT_PATCH: ClassVar[int] = 16
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(120_120, 120_120)
    TEXTS: ClassVar[TokenTexts] = TokenTexts(
        image="<\uff5chy_place▁holder▁no▁102\uff5c>",
        video="",
        begin=("image_start_token", "<\uff5chy_place▁holder▁no▁100\uff5c>"),
        end=("image_end_token", "<\uff5chy_place▁holder▁no▁101\uff5c>"),
    )

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        if not config.processor.get(_WITHOUT_ENDS, True):
            raise config.error(f"{_WITHOUT_ENDS} false is not supported; supported: true")
        return super().of(config, texts)

    def count(self, grid: Grid) -> int:
        return super().count(grid) + grid[1] // self.merge_size + 2
