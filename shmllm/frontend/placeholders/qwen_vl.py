"""Qwen2-VL, 2.5-VL, 3-VL, Qwen3.5, 2.5-Omni, LFM3-VL, PaddleOCR-VL, dots.ocr and ERNIE 4.5 VL: a
token for each square of merged patches of an image, or of a frame of a video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.paddleocr_vl import PaddleOcrVlRules
from shmllm.frontend.images.rules.qwen2_vl import OneFrameRules, Qwen2VLRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import (
    Beside,
    Config,
    TokenIds,
    VideoPlaceholder,
    one_token,
)
from shmllm.frontend.placeholders.squares import SquaresPlaceholder


class TokenTexts(NamedTuple):
    """The texts of tokens that stand for an image and a video, and of those around them with the
    names that tokenizers give these."""

    image: str
    video: str
    begin: tuple[str, str]
    end: tuple[str, str]

    def around(self, texts: Mapping[str, str]) -> tuple[str, str]:
        """The texts of the tokens around an item, of a tokenizer's special tokens."""
        return texts.get(*self.begin), texts.get(*self.end)


@dataclass(frozen=True, kw_only=True)
class QwenVLPlaceholder(SquaresPlaceholder):
    """The defaults of transformers' `Qwen2VLVisionConfig` and `Qwen2_5_VLVisionConfig`."""

    EMBEDS: ClassVar[Beside | None] = "grid"
    RULES: ClassVar[type[Rules]] = Qwen2VLRules
    AUTHOR: ClassVar[str] = "Qwen"
    DEFAULT_PATCH: ClassVar[int] = 14
    DEFAULT_MERGE: ClassVar[int] = 2
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(151655, 151656, 151652, 151653)
    TEXTS: ClassVar[TokenTexts] = TokenTexts(
        image="<|image_pad|>",
        video="<|video_pad|>",
        begin=("vision_start_token", "<|vision_start|>"),
        end=("vision_end_token", "<|vision_end|>"),
    )

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        text = texts.get("image_token", cls.TEXTS.image)
        names, default = ("image_token_id", "image_token_index"), cls.DEFAULT_IDS.image
        token = config.integer(*names, default=default, minimum=0)
        begin, end = cls.TEXTS.around(texts)
        return cls(
            **one_token(text, token, mark=f"{begin}{text}{end}"),
            side=None,
            patch_size=vision.integer("patch_size", default=cls.DEFAULT_PATCH),
            merge_size=vision.integer("spatial_merge_size", default=cls.DEFAULT_MERGE),
        )

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens


@dataclass(frozen=True, kw_only=True)
class Qwen3VLPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `Qwen3VLVisionConfig`."""

    DEFAULT_PATCH: ClassVar[int] = 16


@dataclass(frozen=True, kw_only=True)
class Qwen35Placeholder(Qwen3VLPlaceholder):
    """The defaults of transformers' `Qwen3_5Config`."""

    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(248056, 248057, 248053, 248054)


@dataclass(frozen=True, kw_only=True)
class Lfm3VlPlaceholder(Qwen3VLPlaceholder):
    """The defaults of transformers' `Lfm3VlConfig`."""

    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(125_030, 125_029, 125_009, 125_010)


@dataclass(frozen=True, kw_only=True)
class VideoLlama3Placeholder(QwenVLPlaceholder):
    """The defaults of transformers' `VideoLlama3Config`. Its files do not say what is merged."""

    RULES: ClassVar[type[Rules]] = OneFrameRules
    AUTHOR: ClassVar[str] = "VideoLLaMA 3"
    DEFAULT_PATCH: ClassVar[int] = 16
    DEFAULT_MERGE: ClassVar[int] = 1
    TEXTS: ClassVar[TokenTexts] = QwenVLPlaceholder.TEXTS._replace(
        begin=("vision_start_token", ""), end=("vision_end_token", "")
    )


@dataclass(frozen=True, kw_only=True)
class DotsOcrPlaceholder(QwenVLPlaceholder):
    """The defaults of vLLM's `DotsOCRConfig`, and the marks of its authors' chat template."""

    AUTHOR: ClassVar[str] = "Qwen2-VL"
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(151_665, 151_656)
    TEXTS: ClassVar[TokenTexts] = QwenVLPlaceholder.TEXTS._replace(
        image="<|imgpad|>",
        begin=("vision_start_token", "<|img|>"),
        end=("vision_end_token", "<|endofimg|>"),
    )


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Placeholder(QwenVLPlaceholder):
    """The default of transformers' `MiniMaxM3VLConfig`, and the texts of its processor, which
    writes those around the tokens of an image."""

    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(200_025, 200_026)
    TEXTS: ClassVar[TokenTexts] = TokenTexts(
        image="]<]image[>[",
        video="]<]video[>[",
        begin=("vision_start_token", "]<]start of image[>["),
        end=("vision_end_token", "]<]end of image[>["),
    )

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        found = super().of(config, {})
        return replace(found, mark=found.token)

    def expansion(self, item: PreparedItem) -> str:
        begin, end = self.TEXTS.around({})
        return f"{begin}{super().expansion(item)}{end}"


@dataclass(frozen=True, kw_only=True)
class PaddleOcrVlPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `PaddleOCRVLConfig`."""

    RULES: ClassVar[type[Rules]] = PaddleOcrVlRules
    AUTHOR: ClassVar[str] = "PaddleOCR-VL"
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(100_295, 100_296, 101_305, 101_306)
    TEXTS: ClassVar[TokenTexts] = TokenTexts(
        image="<|IMAGE_PLACEHOLDER|>",
        video="<|video_pad|>",
        begin=("vision_start_token", "<|IMAGE_START|>"),
        end=("vision_end_token", "<|IMAGE_END|>"),
    )


@dataclass(frozen=True, kw_only=True)
class Ernie45VLPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `Ernie4_5_VLMoeConfig`."""

    RULES: ClassVar[type[Rules]] = OneFrameRules
    AUTHOR: ClassVar[str] = "ERNIE 4.5 VL"
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(100_295, 103_367, 101_304, 101_305)
    TEXTS: ClassVar[TokenTexts] = PaddleOcrVlPlaceholder.TEXTS._replace(
        begin=("image_start_token", "<|IMAGE_START|>"), end=("image_end_token", "<|IMAGE_END|>")
    )


@dataclass(frozen=True, kw_only=True)
class QwenVideoPlaceholder(VideoPlaceholder):
    """Of Qwen2-VL and Qwen2.5-VL: a video token for each square of merged patches.

    Attributes:
        image: how the model's prompts contain images.
        begin, end: the texts of the tokens around them.
    """

    EMBEDS: ClassVar[Beside | None] = "grid"
    processors: ClassVar[tuple[str, ...]] = ("Qwen2VLVideoProcessor",)
    IMAGE: ClassVar[type[QwenVLPlaceholder]] = QwenVLPlaceholder

    image: QwenVLPlaceholder
    begin: str
    end: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        known = cls.IMAGE.TEXTS
        text = texts.get("video_token", known.video)
        names, default = ("video_token_id", "video_token_index"), cls.IMAGE.DEFAULT_IDS.video
        token = config.integer(*names, default=default, minimum=0)
        begin, end = known.around(texts)
        mark = f"{begin}{text}{end}"
        replaced, ids = cls._replaced(config, mark, text, token)
        return cls(
            mark=mark,
            replaced=replaced,
            replaced_ids=ids,
            token=text,
            token_id=token,
            image=cls.IMAGE.of(config, texts),
            frames_at_once=config.table("vision_config").integer("temporal_patch_size", default=2),
            begin=begin,
            end=end,
        )

    @classmethod
    def _replaced(
        cls, config: Config, mark: str, text: str, token: int
    ) -> tuple[str, tuple[int, ...]]:
        """What an expansion replaces: its text and its ids."""
        return text, (token,)

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens


@dataclass(frozen=True, kw_only=True)
class Qwen3VideoPlaceholder(QwenVideoPlaceholder):
    """Each frame of a video is one of its own behind its time, as the model's authors and vLLM
    write it: the tokens around the mark go, too. (transformers 5.24 leaves them around the whole.)
    """

    EMBEDS: ClassVar[Beside | None] = None
    processors: ClassVar[tuple[str, ...]] = ("Qwen3VLVideoProcessor",)
    IMAGE: ClassVar[type[QwenVLPlaceholder]] = Qwen3VLPlaceholder

    @classmethod
    def _replaced(
        cls, config: Config, mark: str, text: str, token: int
    ) -> tuple[str, tuple[int, ...]]:
        default = cls.IMAGE.DEFAULT_IDS
        begin = config.integer("vision_start_token_id", default=default.begin, minimum=0)
        end = config.integer("vision_end_token_id", default=default.end, minimum=0)
        return mark, (begin, token, end)

    def expansion(self, item: PreparedItem) -> str:
        tokens = self.token * (item.num_tokens // item.grid[0])
        return "".join(f"{time}{self.begin}{tokens}{self.end}" for time in item.times)


@dataclass(frozen=True, kw_only=True)
class Qwen35VideoPlaceholder(Qwen3VideoPlaceholder):
    """As Qwen3-VL's, with other ids."""

    IMAGE: ClassVar[type[QwenVLPlaceholder]] = Qwen35Placeholder


@dataclass(frozen=True, kw_only=True)
class Lfm3VlVideoPlaceholder(Qwen3VideoPlaceholder):
    """The same frames in place of the mark alone, as transformers' processor writes them."""

    IMAGE: ClassVar[type[QwenVLPlaceholder]] = Lfm3VlPlaceholder

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        found = super().of(config, texts)
        one = one_token(found.token, found.token_id)
        return replace(found, **one)
