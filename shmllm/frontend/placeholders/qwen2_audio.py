"""Qwen2-Audio: an audio token for each four frames of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Config, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioPlaceholder(AudioPlaceholder):
    """Of transformers' `Qwen2AudioProcessor`."""

    DEFAULT_ID: ClassVar[int] = 151646

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        audio = config.table("audio_config")
        text = texts.get("audio_token", "<|AUDIO|>")
        names = "audio_token_id", "audio_token_index"
        token = config.integer(*names, default=cls.DEFAULT_ID, minimum=0)
        begin = texts.get("audio_bos_token", "<|audio_bos|>")
        end = texts.get("audio_eos_token", "<|audio_eos|>")
        return cls(
            **one_token(text, token, mark=f"{begin}{text}{end}"),
            num_mels=audio.integer("num_mel_bins", default=128),
            most_frames=2 * audio.integer("max_source_positions", default=1500),
        )

    def count(self, grid: Grid) -> int:
        return (grid[0] + 1) // 2 // 2

    def expansion(self, item: PreparedItem) -> str:
        return self.token * self.count(item.grid)
