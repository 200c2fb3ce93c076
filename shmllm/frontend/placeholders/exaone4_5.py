"""EXAONE 4.5: an image token, or a video token, for each square of merged patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmllm.frontend.placeholders.family import TokenIds
from shmllm.frontend.placeholders.qwen_vl import (
    QwenVideoPlaceholder,
    QwenVLPlaceholder,
    TokenTexts,
)


@dataclass(frozen=True, kw_only=True)
class Exaone45Placeholder(QwenVLPlaceholder):
    """The defaults of transformers' `Exaone4_5_Config`."""

    AUTHOR: ClassVar[str] = "Qwen2-VL"
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(67, 68)
    TEXTS: ClassVar[TokenTexts] = TokenTexts(
        image="<|image_pad|>",
        video="<|video_pad|>",
        begin=("vision_start_token", "<vision>"),
        end=("vision_end_token", "</vision>"),
    )


@dataclass(frozen=True, kw_only=True)
class Exaone45VideoPlaceholder(QwenVideoPlaceholder):
    """As Qwen2-VL's, with other tokens."""

    IMAGE: ClassVar[type[QwenVLPlaceholder]] = Exaone45Placeholder
