"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR: a token for each square of merged patches of an image, or of a
frame of a video. The token is the same for both: those of a video lie between two others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.glm4v import Glm4vRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import (
    Beside,
    Config,
    TokenIds,
    VideoPlaceholder,
    one_token,
)
from shmllm.frontend.placeholders.squares import SquaresPlaceholder

BEGIN_IMAGE, END_IMAGE = "<|begin_of_image|>", "<|end_of_image|>"
BEGIN_VIDEO, END_VIDEO = "<|begin_of_video|>", "<|end_of_video|>"


@dataclass(frozen=True, kw_only=True)
class Glm4vPlaceholder(SquaresPlaceholder):
    """The defaults of transformers' `Glm4vConfig`.

    Attributes:
        around_videos: the tokens before and behind the frames of a video.
    """

    EMBEDS: ClassVar[Beside | None] = "grid"
    RULES: ClassVar[type[Rules]] = Glm4vRules
    AUTHOR: ClassVar[str] = "GLM-4.1V"
    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(151_343, 151_344, 151_341, 151_342)

    around_videos: tuple[int, int]

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision, default = config.table("vision_config"), cls.DEFAULT_IDS
        text = texts.get("image_token", "<|image|>")
        token = config.integer("image_token_id", default=default.image, minimum=0)
        return cls(
            **one_token(text, token, mark=f"{BEGIN_IMAGE}{text}{END_IMAGE}"),
            side=None,
            patch_size=vision.integer("patch_size", default=14),
            merge_size=vision.integer("spatial_merge_size", default=2),
            around_videos=(
                config.integer("video_start_token_id", default=default.begin, minimum=0),
                config.integer("video_end_token_id", default=default.end, minimum=0),
            ),
        )

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens

    def visible(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(self.are_of_videos(ids), -1, ids)

    def are_of_videos(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether tokens lie between those around the frames of a video."""
        begun, ended = (np.cumsum(ids == token) for token in self.around_videos)
        return begun > ended


@dataclass(frozen=True, kw_only=True)
class Glm4vMoePlaceholder(Glm4vPlaceholder):
    """The defaults of transformers' `Glm4vMoeConfig`."""

    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(151_363, 151_364, 151_341, 151_342)


@dataclass(frozen=True, kw_only=True)
class Glm46VPlaceholder(Glm4vPlaceholder):
    """The defaults of transformers' `Glm46VConfig`."""

    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(151_343, 151_344, 151_361, 151_362)


@dataclass(frozen=True, kw_only=True)
class GlmOcrPlaceholder(Glm4vPlaceholder):
    """The defaults of transformers' `GlmOcrConfig`."""

    DEFAULT_IDS: ClassVar[TokenIds] = TokenIds(59_280, 59_281, 59_258, 59_259)


@dataclass(frozen=True, kw_only=True)
class Glm4vVideoPlaceholder(VideoPlaceholder):
    """Each frame of a video is written as an image before its time.

    Attributes:
        image: how the model's prompts contain images.
    """

    processors: ClassVar[tuple[str, ...]] = ("Glm4vVideoProcessor", "Glm46VVideoProcessor")
    IMAGE: ClassVar[type[Glm4vPlaceholder]] = Glm4vPlaceholder

    image: Glm4vPlaceholder

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        image = cls.IMAGE.of(config, texts)
        default = cls.IMAGE.DEFAULT_IDS.video
        token = config.integer("video_token_id", default=default, minimum=0)
        mark = f"{BEGIN_VIDEO}{texts.get('video_token', '<|video|>')}{END_VIDEO}"
        begin, end = image.around_videos
        return cls(
            mark=mark,
            replaced=mark,
            replaced_ids=(begin, token, end),
            token=image.token,
            token_id=image.token_id,
            image=image,
            frames_at_once=config.table("vision_config").integer("temporal_patch_size", default=2),
        )

    def visible(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        of_images = (ids == self.token_id) & ~self.image.are_of_videos(ids)
        return np.where(of_images, -1, ids)

    def expansion(self, item: PreparedItem) -> str:
        tokens = self.token * (item.num_tokens // item.grid[0])
        frames = "".join(f"{BEGIN_IMAGE}{tokens}{END_IMAGE}{time}" for time in item.times)
        return f"{BEGIN_VIDEO}{frames}{END_VIDEO}"


@dataclass(frozen=True, kw_only=True)
class Glm4vMoeVideoPlaceholder(Glm4vVideoPlaceholder):
    """As GLM-4.1V's, with other ids."""

    IMAGE: ClassVar[type[Glm4vPlaceholder]] = Glm4vMoePlaceholder


@dataclass(frozen=True, kw_only=True)
class Glm46VVideoPlaceholder(Glm4vVideoPlaceholder):
    """As GLM-4.1V's, with other ids and another processor by default."""

    processors: ClassVar[tuple[str, ...]] = Glm4vVideoPlaceholder.processors[::-1]
    IMAGE: ClassVar[type[Glm4vPlaceholder]] = Glm46VPlaceholder


@dataclass(frozen=True, kw_only=True)
class GlmOcrVideoPlaceholder(Glm46VVideoPlaceholder):
    """As GLM-4.6V's, with other ids."""

    IMAGE: ClassVar[type[Glm4vPlaceholder]] = GlmOcrPlaceholder
