"""Kimi K2.5 and Kimi-VL: an image token for each square of merged patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.kimi import KimiRules, KimiVLRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, one_token
from shmllm.frontend.placeholders.squares import SquaresPlaceholder


@dataclass(frozen=True, kw_only=True)
class KimiK25Placeholder(SquaresPlaceholder):
    """
    Attributes:
        BEGIN: the text of the token before the kind of an item.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = KimiRules
    AUTHOR: ClassVar[str] = "Kimi K2.5"
    BEGIN: ClassVar[str] = "<|media_begin|>"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        text = texts.get("image_token", "<|media_pad|>")
        names = "image_token_id", "media_placeholder_token_id"
        token = config.integer(*names, default=163_605, minimum=0)
        mark = f"{cls.BEGIN}image<|media_content|>{text}<|media_end|>"
        sides = vision.values.get("merge_kernel_size") or [2, 2]
        if not isinstance(sides, list) or type(sides[0]) is not int or sides[0] < 1:
            raise vision.error(f"'merge_kernel_size' must be [n, n], not {sides!r}")
        return cls(
            **one_token(text, token, mark=mark),
            side=None,
            patch_size=vision.integer("patch_size", default=14),
            merge_size=sides[0],
        )

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens


@dataclass(frozen=True, kw_only=True)
class KimiVLPlaceholder(KimiK25Placeholder):
    """The same with another token before the kind of an item."""

    RULES: ClassVar[type[Rules]] = KimiVLRules
    AUTHOR: ClassVar[str] = "Kimi-VL"
    BEGIN: ClassVar[str] = "<|media_start|>"
