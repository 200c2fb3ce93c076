"""Whisper: a sound stands before the text, which its decoder writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Config
from shmllm.params.items import Grid

NO_MARK: dict[str, Any] = {
    "mark": "",
    "replaced": "",
    "replaced_ids": (),
    "token": "",
    "token_id": -1,
}
"""The attributes of a placeholder of which a text has no token."""


@dataclass(frozen=True, kw_only=True)
class EncodedPlaceholder(AudioPlaceholder):
    """No token of a text stands for the sound, which an encoder computes."""

    is_optional: ClassVar[bool] = False

    def expansion(self, item: PreparedItem) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class WhisperPlaceholder(EncodedPlaceholder):
    """All sounds have the same number of positions."""

    fills: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return cls(
            **NO_MARK,
            num_mels=config.integer("num_mel_bins", default=80),
            most_frames=2 * config.integer("max_source_positions", default=1500),
        )

    def count(self, grid: Grid) -> int:
        return self.most_frames // 2
