"""EXAONE 4.5 and HyperCLOVA X: a token of an image, or of a video, for each square of merged
patches."""

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
class HyperClovaPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `HyperCLOVAXVisionV2Config`."""

    AUTHOR: ClassVar[str] = "Qwen2-VL"
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(128_060, 128_061)
    TEXTS: ClassVar[TokenTexts] = QwenVLPlaceholder.TEXTS._replace(
        begin=("vision_start_token", ""), end=("vision_end_token", "")
    )


@dataclass(frozen=True, kw_only=True)
class Exaone45VideoPlaceholder(QwenVideoPlaceholder):
    """As Qwen2-VL's, with other tokens."""

    IMAGE: ClassVar[type[QwenVLPlaceholder]] = Exaone45Placeholder
