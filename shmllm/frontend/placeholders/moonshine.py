"""Moonshine: a sound stands before the text, which its decoder writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.audio_counts import RATE, num_convolved_samples
from shmllm.formats.audio_settings import MOST_WAVE_SECONDS
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.whisper import NO_MARK, EncodedPlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class MoonshinePlaceholder(EncodedPlaceholder):
    """The features of a sound are its samples."""

    frames_behind: ClassVar[int | None] = 0

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return cls(**NO_MARK, num_mels=1, most_frames=MOST_WAVE_SECONDS * RATE)

    def count(self, grid: Grid) -> int:
        return num_convolved_samples(grid[0])
