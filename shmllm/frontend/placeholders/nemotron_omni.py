"""Nemotron 3 Omni: a sound between marks, an audio token for each embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shmllm.formats.audio_counts import num_halved
from shmllm.formats.audio_settings import MOST_OMNI_FRAMES, AudioSettings, ParakeetSettings
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class NemotronOmniAudioPlaceholder(AudioPlaceholder):
    """Of transformers' `NemotronH_Omni_Reasoning_V3Processor`.

    Attributes:
        num_halvings: how many convolutions read every other frame.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    frames_behind: ClassVar[int | None] = 0

    num_halvings: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        audio = config.table("audio_config")
        text = texts.get("audio_token", "<so_embedding>")
        return cls(
            **one_token(text, config.integer("audio_token_id", minimum=0)),
            num_mels=audio.integer("num_mel_bins", default=80),
            most_frames=MOST_OMNI_FRAMES,
            num_halvings=audio.integer("subsampling_factor", default=8).bit_length() - 1,
        )

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return config.values.get("audio_config") is not None

    def adapted(self, settings: AudioSettings) -> AudioSettings:
        if not isinstance(settings, ParakeetSettings):
            raise Config({}).error(
                f"the model needs Parakeet's feature extractor, not {settings!r}"
            )
        return replace(settings, longest=self.most_frames * settings.hop)

    def count(self, grid: Grid) -> int:
        """The silence behind a sound has an embedding if the last frame fills a position."""
        return num_halved(grid[0] + 1, self.num_halvings) if grid[0] else 0

    def expansion(self, item: PreparedItem) -> str:
        return f"<so_start>{self.token * item.num_tokens}<so_end>"
