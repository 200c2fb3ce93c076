"""Janus: as many image tokens as a tile has patches, between two others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.janus import JanusRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.tiles import TilesPlaceholder


@dataclass(frozen=True, kw_only=True)
class JanusPlaceholder(TilesPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around an image.
    """

    RULES: ClassVar[type[Rules]] = JanusRules
    AUTHOR: ClassVar[str] = "Janus"

    begin: str
    end: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = vision.integer("image_size", default=384)
        text = texts.get("image_token", "<image_placeholder>")
        return cls(
            **one_token(text, config.integer("image_token_id", default=100_581, minimum=0)),
            side=side,
            tokens=(side // vision.integer("patch_size", default=16)) ** 2,
            begin=texts.get("boi_token", "<begin_of_image>"),
            end=texts.get("eoi_token", "<end_of_image>"),
        )

    def expansion(self, item: PreparedItem) -> str:
        return f"{self.begin}{self.token * self.count(item.grid)}{self.end}"
