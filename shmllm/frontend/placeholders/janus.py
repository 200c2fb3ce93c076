"""Janus: as many image tokens as a tile has patches, between two others. DeepSeek-VL: the same
without these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.janus import JanusRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, one_token
from shmllm.frontend.placeholders.tiles import TilesPlaceholder


@dataclass(frozen=True, kw_only=True)
class JanusPlaceholder(TilesPlaceholder):
    """Attributes:
    TOKEN: the default of the token that stands for an embedding.
    SIDES: the defaults of the sides of an image and of a patch, in pixels.
    begin, end: the texts of the tokens around an image.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = JanusRules
    AUTHOR: ClassVar[str] = "Janus"
    TOKEN: ClassVar[int] = 100_581
    SIDES: ClassVar[tuple[int, int]] = 384, 16

    begin: str
    end: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side, patch_size = (
            vision.integer(name, default=default)
            for name, default in zip(("image_size", "patch_size"), cls.SIDES, strict=True)
        )
        text = texts.get("image_token", "<image_placeholder>")
        begin, end = cls._around(texts)
        return cls(
            **one_token(text, config.integer("image_token_id", default=cls.TOKEN, minimum=0)),
            side=side,
            tokens=(side // patch_size) ** 2,
            begin=begin,
            end=end,
        )

    @classmethod
    def _around(cls, texts: Mapping[str, str]) -> tuple[str, str]:
        """`begin` and `end`, of the texts of special tokens."""
        return texts.get("boi_token", "<begin_of_image>"), texts.get("eoi_token", "<end_of_image>")

    def expansion(self, item: PreparedItem) -> str:
        return f"{self.begin}{self.token * item.num_tokens}{self.end}"


@dataclass(frozen=True, kw_only=True)
class DeepseekVLPlaceholder(JanusPlaceholder):
    """The defaults of transformers' `DeepseekVLConfig`."""

    AUTHOR: ClassVar[str] = "DeepSeek-VL"
    TOKEN: ClassVar[int] = 100_015
    SIDES: ClassVar[tuple[int, int]] = 224, 16

    @classmethod
    def _around(cls, texts: Mapping[str, str]) -> tuple[str, str]:
        return "", ""
