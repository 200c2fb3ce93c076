"""Qwen2.5-Omni: images and videos of Qwen2.5-VL between other tokens, and an audio token for each
four frames of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shmllm.formats.audio_settings import AudioSettings
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.qwen2_audio import Qwen2AudioPlaceholder
from shmllm.frontend.placeholders.qwen_vl import (
    QwenVideoPlaceholder,
    QwenVLPlaceholder,
    TokenTexts,
)

MOST_FRAMES = 30_000
"""The most frames of a sound that engines take: 300 seconds."""


@dataclass(frozen=True, kw_only=True)
class OmniPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `Qwen2_5OmniThinkerConfig`."""

    TEXTS: ClassVar[TokenTexts] = TokenTexts(
        image="<|IMAGE|>",
        video="<|VIDEO|>",
        begin=("vision_bos_token", "<|vision_bos|>"),
        end=("vision_eos_token", "<|vision_eos|>"),
    )


@dataclass(frozen=True, kw_only=True)
class OmniVideoPlaceholder(QwenVideoPlaceholder):
    """Without the sound of a video. Frames have bounds of their own, those of transformers'
    `Qwen2_5OmniProcessor`, as published files have none for them."""

    own_settings: ClassVar[frozenset[str]] = frozenset({"size", "min_pixels", "max_pixels"})
    IMAGE: ClassVar[type[QwenVLPlaceholder]] = OmniPlaceholder


@dataclass(frozen=True, kw_only=True)
class OmniAudioPlaceholder(Qwen2AudioPlaceholder):
    """The tower computes chunks, and the feature extractor decides how long a sound is."""

    frames_behind: ClassVar[int] = 0

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return replace(super().of(config, texts), most_frames=MOST_FRAMES)

    def check_settings(self, settings: AudioSettings) -> None:
        longest = replace(self, most_frames=min(self.most_frames, settings.most_frames))
        Qwen2AudioPlaceholder.check_settings(longest, settings)
