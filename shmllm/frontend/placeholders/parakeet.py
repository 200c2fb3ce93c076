"""Cohere Transcribe and Canary: a sound stands before the text, which their decoders write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.audio_counts import num_halved
from shmllm.formats.audio_settings import MOST_PARAKEET_FRAMES, AudioSettings, ParakeetSettings
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.whisper import NO_MARK, EncodedPlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class ParakeetPlaceholder(EncodedPlaceholder):
    """
    Attributes:
        MELS: the default of ``num_mel_bins``, and that without any ``encoder_config``.
        num_halvings: how many convolutions read every other frame.
    """

    MELS: ClassVar[tuple[int, int]] = (80, 128)
    frames_behind: ClassVar[int | None] = 0

    num_halvings: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        encoder = config.table("encoder_config")
        mels = cls.MELS[not encoder.values]
        return cls(
            **NO_MARK,
            num_mels=encoder.integer("num_mel_bins", default=mels),
            most_frames=MOST_PARAKEET_FRAMES,
            num_halvings=encoder.integer("subsampling_factor", default=8).bit_length() - 1,
        )

    def check_settings(self, settings: AudioSettings) -> None:
        is_known = isinstance(settings, ParakeetSettings)
        if not is_known or settings.num_mels != self.num_mels:
            raise Config({}).error(
                f"the audio tower takes {self.num_mels} features of Parakeet's kind, not those of "
                f"{settings!r}"
            )

    def count(self, grid: Grid) -> int:
        return num_halved(grid[0], self.num_halvings)


@dataclass(frozen=True, kw_only=True)
class CohereAsrPlaceholder(ParakeetPlaceholder):
    """Fields of its ``encoder_config`` that are absent are those of a model without any."""

    MELS: ClassVar[tuple[int, int]] = (128, 128)
