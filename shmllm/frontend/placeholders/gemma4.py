"""Gemma 4: a soft token for each square of merged patches of an image or a frame of a video, or for
four frames of a sound, between two others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.formats.audio_settings import MOST_SAMPLED_FRAMES
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.gemma4 import Gemma4Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import (
    AudioPlaceholder,
    Config,
    VideoPlaceholder,
    one_token,
)
from shmllm.frontend.placeholders.squares import SquaresPlaceholder
from shmllm.params.items import Grid

MOST_FRAMES = 2999
"""The frames of 30 seconds."""


@dataclass(frozen=True, kw_only=True)
class Gemma4Placeholder(SquaresPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around an image.
    longest_side: the most patches in a row and in a column.
    """

    RULES: ClassVar[type[Rules]] = Gemma4Rules
    AUTHOR: ClassVar[str] = "Gemma 4"

    begin: str
    end: str
    longest_side: int

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return bool(config.table("vision_config").values)

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        token = config.integer("image_token_id", default=258_880, minimum=0)
        return cls(
            **one_token(texts.get("image_token", "<|image|>"), token),
            side=None,
            patch_size=vision.integer("patch_size", default=16),
            merge_size=vision.integer("pooling_kernel_size", default=3),
            begin=texts.get("boi_token", "<|image>"),
            end=texts.get("eoi_token", "<image|>"),
            longest_side=cls._longest_side(vision),
        )

    @classmethod
    def _longest_side(cls, vision: Config) -> int:
        return vision.integer("position_embedding_size", default=10_240)

    def expansion(self, item: PreparedItem) -> str:
        return f"{self.begin}{self.token * self.count(item.grid)}{self.end}"

    def check_sides(self, height: int, width: int) -> None:
        if max(height, width) > self.longest_side * self.patch_size:
            raise RequestError(
                f"the image becomes {width}x{height} pixels, but the model takes at most "
                f"{self.longest_side * self.patch_size:,} in a row or column; crop it"
            )


@dataclass(frozen=True, kw_only=True)
class Gemma4VideoPlaceholder(VideoPlaceholder):
    """Each frame of a video is an image of its own behind its minutes and seconds.

    Attributes:
        image: how the model's prompts contain images.
    """

    processors: ClassVar[tuple[str, ...]] = ("Gemma4VideoProcessor",)
    IMAGE: ClassVar[type[Gemma4Placeholder]] = Gemma4Placeholder

    image: Gemma4Placeholder

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return Gemma4Placeholder.is_taken(config)

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        token = config.integer("video_token_id", default=258_884, minimum=0)
        image = cls.IMAGE.of(config, texts)
        return cls(**one_token("<|video|>", token), image=image, frames_at_once=1)

    def expansion(self, item: PreparedItem) -> str:
        tokens = self.token * (item.num_tokens // item.grid[0])
        frame = f"{self.image.begin}{tokens}{self.image.end}"
        return " ".join(f"{time} {frame}" for time in item.times)


@dataclass(frozen=True, kw_only=True)
class Gemma4AudioPlaceholder(AudioPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around a sound.
    """

    MOST_FRAMES: ClassVar[int] = MOST_FRAMES

    begin: str
    end: str

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        """Models whose images attend both ways have no sounds."""
        both_ways = config.table("text_config").values.get("use_bidirectional_attention")
        return bool(config.table("audio_config").values) and both_ways is None

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        token = config.integer("audio_token_id", default=258_881, minimum=0)
        return cls(
            **one_token(texts.get("audio_token", "<|audio|>"), token),
            num_mels=cls._num_features(config.table("audio_config")),
            most_frames=cls.MOST_FRAMES,
            begin=texts.get("boa_token", "<|audio>"),
            end=texts.get("eoa_token", "<audio|>"),
        )

    @classmethod
    def _num_features(cls, audio: Config) -> int:
        """The features of a frame."""
        channels = audio.values.get("subsampling_conv_channels")
        first = channels[0] if isinstance(channels, list) and channels else 128
        return 4 * (first // 4) if type(first) is int else 0

    def count(self, grid: Grid) -> int:
        return -(-grid[0] // 4)

    def expansion(self, item: PreparedItem) -> str:
        return f"{self.begin}{self.token * self.count(item.grid)}{self.end}"


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedPlaceholder(Gemma4Placeholder):
    """Gemma 4 12B: the same."""

    @classmethod
    def _longest_side(cls, vision: Config) -> int:
        merge_size = vision.integer("pooling_kernel_size", default=3)
        return merge_size * vision.integer("mm_posemb_size", default=1120)


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedVideoPlaceholder(Gemma4VideoPlaceholder):
    """Gemma 4 12B: the same."""

    processors: ClassVar[tuple[str, ...]] = ("Gemma4UnifiedVideoProcessor",)
    IMAGE: ClassVar[type[Gemma4Placeholder]] = Gemma4UnifiedPlaceholder


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedAudioPlaceholder(Gemma4AudioPlaceholder):
    """Gemma 4 12B: a token for each frame."""

    MOST_FRAMES: ClassVar[int] = MOST_SAMPLED_FRAMES

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return bool(config.table("audio_config").values)

    @classmethod
    def _num_features(cls, audio: Config) -> int:
        return audio.integer("audio_embed_dim", default=640)

    def count(self, grid: Grid) -> int:
        return grid[0]
