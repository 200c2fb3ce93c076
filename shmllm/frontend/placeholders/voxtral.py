"""Voxtral: audio tokens for each part of a sound, behind a token that begins it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class VoxtralPlaceholder(AudioPlaceholder):
    """Of mistral_common's encoder of sounds.

    Attributes:
        factor: how many positions, of two frames each, become an embedding.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    divides: ClassVar[bool] = True

    factor: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        audio = config.table("audio_config")
        width = audio.integer("d_model", "hidden_size", default=1280)
        inner = audio.integer("encoder_ffn_dim", "intermediate_size", default=5120, minimum=width)
        text = texts.get("audio_token", "[AUDIO]")
        token = config.integer("audio_token_id", default=24, minimum=0)
        begin = texts.get("begin_audio_token", "[BEGIN_AUDIO]")
        return cls(
            **one_token(text, token, mark=f"{begin}{text}"),
            num_mels=audio.integer("num_mel_bins", default=128),
            most_frames=2 * audio.integer("max_source_positions", default=1500),
            factor=inner // width,
        )

    def count(self, grid: Grid) -> int:
        return (grid[0] + 1) // 2 // self.factor

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
