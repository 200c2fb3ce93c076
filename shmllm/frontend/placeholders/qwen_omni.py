"""Qwen2.5-Omni and Qwen3-Omni: images of Qwen2.5-VL and Qwen3-VL, videos in one piece, sounds.
Qwen3-ASR: sounds as in Qwen3-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from shmllm.formats.audio_settings import AudioSettings, UnpaddedSettings, WhisperSettings
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config
from shmllm.frontend.placeholders.qwen2_audio import Qwen2AudioPlaceholder
from shmllm.frontend.placeholders.qwen_vl import (
    Qwen3VLPlaceholder,
    QwenVideoPlaceholder,
    QwenVLPlaceholder,
    TokenTexts,
)
from shmllm.params.items import Grid


def _bounds(side: int) -> dict[str, Any]:
    """The bounds of frames of videos, in pixels, whatever images have: 128 and 768 squares."""
    size = {"shortest_edge": 128 * side**2, "longest_edge": 768 * side**2}
    return {"size": size, "min_pixels": None, "max_pixels": None}


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
    """Without the sound of a video. The bounds are those of transformers' `Qwen2_5OmniProcessor`,
    as published files have none for videos."""

    EMBEDS: ClassVar[Beside | None] = None
    own_settings: ClassVar[Mapping[str, Any]] = _bounds(28)
    IMAGE: ClassVar[type[QwenVLPlaceholder]] = OmniPlaceholder


@dataclass(frozen=True, kw_only=True)
class OmniAudioPlaceholder(Qwen2AudioPlaceholder):
    """The tower computes chunks, and the feature extractor decides how long a sound is."""

    frames_behind: ClassVar[int | None] = 0
    MOST_FRAMES: ClassVar[int] = 30_000

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return replace(super().of(config, texts), most_frames=cls.MOST_FRAMES)

    def check_settings(self, settings: AudioSettings) -> None:
        if not isinstance(settings, WhisperSettings):
            raise Config({}).error(f"the model needs Whisper's feature extractor, not {settings!r}")
        longest = replace(self, most_frames=min(self.most_frames, settings.most_frames))
        AudioPlaceholder.check_settings(longest, settings)


@dataclass(frozen=True, kw_only=True)
class Omni3Placeholder(Qwen3VLPlaceholder):
    """The defaults of transformers' `Qwen3OmniMoeThinkerConfig`."""

    TEXTS: ClassVar[TokenTexts] = Qwen3VLPlaceholder.TEXTS._replace(
        begin=("vision_bos_token", "<|vision_start|>"), end=("vision_eos_token", "<|vision_end|>")
    )


@dataclass(frozen=True, kw_only=True)
class Omni3VideoPlaceholder(OmniVideoPlaceholder):
    """Of transformers' `Qwen3OmniMoeProcessor`."""

    own_settings: ClassVar[Mapping[str, Any]] = _bounds(32)
    IMAGE: ClassVar[type[QwenVLPlaceholder]] = Omni3Placeholder


@dataclass(frozen=True, kw_only=True)
class Omni3AudioPlaceholder(OmniAudioPlaceholder):
    """Sounds of up to 40 minutes, whatever the feature extractor says of the longest one: the
    processor neither cuts sounds nor fills them with silence.

    Attributes:
        chunk: the frames of a chunk.
    """

    MOST_FRAMES: ClassVar[int] = 240_000
    FEWEST: ClassVar[int] = 0
    TEXTS: ClassVar[Mapping[str, str]] = {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }

    chunk: int = 100

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        window = config.table("audio_config").integer("n_window", default=50)
        return replace(super().of(config, {**cls.TEXTS, **texts}), chunk=2 * window)

    def adapted(self, settings: AudioSettings) -> AudioSettings:
        if not isinstance(settings, WhisperSettings):
            return settings
        seconds = self.most_frames * settings.hop // settings.rate
        return UnpaddedSettings(**{"fewest": self.FEWEST} | asdict(settings) | {"seconds": seconds})

    def count(self, grid: Grid) -> int:
        whole, rest = divmod(grid[0], self.chunk)
        return whole * -(-self.chunk // 8) + -(-rest // 8)


@dataclass(frozen=True, kw_only=True)
class Qwen3ASRPlaceholder(Omni3AudioPlaceholder):
    """Of transformers' `Qwen3ASRProcessor`. Silence fills sounds of less than half a second."""

    FEWEST: ClassVar[int] = 8000
    DEFAULT_ID: ClassVar[int] = 151676
