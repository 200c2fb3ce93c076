"""Granite Speech: some audio tokens for each window of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.audio_settings import MOST_SECONDS, AudioSettings, GraniteSpeechSettings
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config, one_token
from shmllm.params.items import Grid

_FRAMES_OF_SECOND = 50


@dataclass(frozen=True, kw_only=True)
class GraniteSpeechPlaceholder(AudioPlaceholder):
    """Of transformers' `GraniteSpeechProcessor`.

    Attributes:
        window: the frames that the projector reads together.
        rate: by what their number is divided to get that of embeddings.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    frames_behind: ClassVar[int | None] = 0

    window: int
    rate: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        encoder = config.table("encoder_config")
        text = texts.get("audio_token", "<|audio|>")
        token = config.integer("audio_token_index", "audio_token_id", default=49155, minimum=0)
        return cls(
            **one_token(text, token),
            num_mels=encoder.integer("input_dim", "num_mel_bins", default=160),
            most_frames=MOST_SECONDS * _FRAMES_OF_SECOND,
            window=config.integer("window_size", default=15),
            rate=config.integer("downsample_rate", default=5),
        )

    def check_settings(self, settings: AudioSettings) -> None:
        if not isinstance(settings, GraniteSpeechSettings):
            raise Config({}).error(
                f"the model needs Granite Speech's feature extractor, not {settings!r}"
            )
        super().check_settings(settings)
        found = settings.group, settings.rate_of_group
        if found != (self.window, self.rate):
            raise Config({}).error(
                f"the projector makes {self.window} / {self.rate} embeddings of a window, the "
                f"feature extractor expects {found[0]} / {found[1]}"
            )

    def count(self, grid: Grid) -> int:
        return -(-grid[0] // self.window) * (self.window // self.rate)

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
