"""Whisper: a sound stands before the text, which its decoder writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Config
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class WhisperPlaceholder(AudioPlaceholder):
    """No token of a text stands for the sound."""

    fills: ClassVar[bool] = True
    is_optional: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return cls(
            mark="",
            replaced="",
            replaced_ids=(),
            token="",
            token_id=-1,
            num_mels=config.integer("num_mel_bins", default=80),
            most_frames=2 * config.integer("max_source_positions", default=1500),
        )

    def count(self, grid: Grid) -> int:
        return self.most_frames // 2

    def expansion(self, item: PreparedItem) -> str:
        return ""
