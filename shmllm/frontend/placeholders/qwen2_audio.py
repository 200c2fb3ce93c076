"""Qwen2-Audio: an audio token for each four frames of features. Audio Flamingo 3 and GLM-ASR, whose
sounds have parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioPlaceholder(AudioPlaceholder):
    """Of transformers' `Qwen2AudioProcessor`.

    Attributes:
        DEFAULT_ID: the token that stands for an embedding, where config.json names none.
        BEGIN, TOKEN, END: the texts of the tokens of a sound, where the tokenizer names none.
        POSITIONS: the field of ``audio_config`` with the positions of the tower.
        NUM_MELS: the features of a frame, where it has none.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    DEFAULT_ID: ClassVar[int] = 151646
    BEGIN: ClassVar[str] = "<|audio_bos|>"
    TOKEN: ClassVar[str] = "<|AUDIO|>"
    END: ClassVar[str] = "<|audio_eos|>"
    POSITIONS: ClassVar[str] = "max_source_positions"
    NUM_MELS: ClassVar[int] = 128

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        audio = config.table("audio_config")
        text = texts.get("audio_token", cls.TOKEN)
        names = "audio_token_id", "audio_token_index"
        token = config.integer(*names, default=cls.DEFAULT_ID, minimum=0)
        begin = texts.get("audio_bos_token", cls.BEGIN)
        end = texts.get("audio_eos_token", cls.END)
        return cls(
            **one_token(text, token, mark=f"{begin}{text}{end}"),
            num_mels=audio.integer("num_mel_bins", default=cls.NUM_MELS),
            most_frames=2 * audio.integer(cls.POSITIONS, default=1500),
        )

    def count(self, grid: Grid) -> int:
        return (grid[0] + 1) // 2 // 2

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens


@dataclass(frozen=True, kw_only=True)
class AudioFlamingoPlaceholder(Qwen2AudioPlaceholder):
    """Of transformers' `AudioFlamingo3Processor`."""

    divides: ClassVar[bool] = True
    divides_samples: ClassVar[bool] = True
    DEFAULT_ID: ClassVar[int] = 151669
    BEGIN: ClassVar[str] = ""
    TOKEN: ClassVar[str] = "<sound>"
    END: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class MusicFlamingoPlaceholder(AudioFlamingoPlaceholder):
    """Of transformers' `MusicFlamingoProcessor`, which writes the tokens around a sound.

    Attributes:
        begin, end: the texts of these tokens.
    """

    counts_parts: ClassVar[bool] = True

    begin: str = "<|sound_bos|>"
    end: str = "<|sound_eos|>"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        own = {name: value for name, value in texts.items() if name == "audio_token"}
        begin = texts.get("audio_bos_token", cls.begin)
        end = texts.get("audio_eos_token", cls.end)
        return replace(super().of(config, own), begin=begin, end=end)

    def expansion(self, item: PreparedItem) -> str:
        return f"{self.begin}{super().expansion(item)}{self.end}"


@dataclass(frozen=True, kw_only=True)
class GlmAsrPlaceholder(AudioFlamingoPlaceholder):
    """Of transformers' `GlmAsrProcessor`; chat templates write the tokens around a sound. The tower
    reads the silence behind a part, too."""

    frames_behind: ClassVar[int | None] = None
    DEFAULT_ID: ClassVar[int] = 59260
    BEGIN: ClassVar[str] = "<|begin_of_audio|>"
    TOKEN: ClassVar[str] = "<|pad|>"
    END: ClassVar[str] = "<|end_of_audio|>"
    POSITIONS: ClassVar[str] = "max_position_embeddings"

    def count(self, grid: Grid) -> int:
        return (grid[0] + 1) // 2 // 4
