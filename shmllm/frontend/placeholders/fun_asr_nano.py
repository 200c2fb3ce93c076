"""Fun-ASR-Nano: an audio token for each frame of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shmllm.formats.audio_settings import AudioSettings, FunAsrSettings
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class FunAsrPlaceholder(AudioPlaceholder):
    """Of transformers' `FunAsrNanoProcessor`."""

    EMBEDS: ClassVar[Beside | None] = "nothing"
    frames_behind: ClassVar[int | None] = 0

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        audio = config.table("audio_config")
        text = texts.get("audio_token", "<|object_ref_start|>")
        num_filters = audio.integer("num_mel_bins", default=80)
        positions = audio.integer("max_position_embeddings", default=2049, minimum=2)
        return cls(
            **one_token(text, config.integer("audio_token_id", default=151646, minimum=0)),
            num_mels=num_filters * audio.integer("num_stacked_frames", default=7),
            most_frames=positions - 1,
        )

    def adapted(self, settings: AudioSettings) -> AudioSettings:
        if not isinstance(settings, FunAsrSettings):
            raise Config({}).error(
                f"the model needs Fun-ASR-Nano's feature extractor, not {settings!r}"
            )
        return replace(settings, longest=self.most_frames)

    def count(self, grid: Grid) -> int:
        return grid[0]

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
