"""Muse Glimmer: a token for each square of merged patches of an image between two others, or of a
frame of a video behind its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.muse_glimmer import MuseGlimmerRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, VideoPlaceholder, one_token
from shmllm.frontend.placeholders.squares import SquaresPlaceholder

_AROUND_IMAGES = "<|image_start|>", "<|image_end|>"
_AROUND_VIDEOS, _BETWEEN = ("<|vid_start|>", "<|vid_end|>"), "<|vid_frame_separator|>"


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerPlaceholder(SquaresPlaceholder):
    """The texts of the tokens are fixed, as in transformers' `MuseGlimmerProcessor`."""

    RULES: ClassVar[type[Rules]] = MuseGlimmerRules
    AUTHOR: ClassVar[str] = "Muse Glimmer"

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return bool(config.table("vision_config").values)

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        token = config.integer("image_token_id", default=200_092, minimum=0)
        return cls(
            **one_token("<|patch|>", token),
            side=None,
            patch_size=vision.integer("patch_size", default=14),
            merge_size=vision.integer("merge_size", default=2),
        )

    def expansion(self, item: PreparedItem) -> str:
        begin, end = _AROUND_IMAGES
        return f"{begin}{self.token * self.count(item.grid)}{end}"


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerVideoPlaceholder(VideoPlaceholder):
    """Frames of a video follow one another with a token between them."""

    processors: ClassVar[tuple[str, ...]] = ("MuseGlimmerVideoProcessor",)

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return MuseGlimmerPlaceholder.is_taken(config)

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        token = config.integer("video_token_id", default=200_091, minimum=0)
        return cls(
            **one_token("<|video|>", token),
            image=MuseGlimmerPlaceholder.of(config, texts),
            frames_at_once=config.table("vision_config").integer("patch_temporal", default=2),
        )

    def expansion(self, item: PreparedItem) -> str:
        begin, end = _AROUND_VIDEOS
        tokens = self.token * (item.num_tokens // item.grid[0])
        frames = _BETWEEN.join(f"{time}{tokens}" for time in item.times)
        return f"{begin}{frames}{end}"
