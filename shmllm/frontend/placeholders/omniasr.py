"""Omnilingual ASR: an audio token for each position behind convolutions over samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.audio_counts import RATE, num_convolved_samples
from shmllm.formats.audio_settings import MOST_OMNIASR_SECONDS
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import AudioPlaceholder, Beside, Config, one_token
from shmllm.params.items import Grid

_LENGTHS, _STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)


@dataclass(frozen=True, kw_only=True)
class OmniAsrPlaceholder(AudioPlaceholder):
    """Of transformers' `OmniASRProcessor`.

    Attributes:
        convolutions: the lengths and strides of the convolutions.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    frames_behind: ClassVar[int | None] = 0

    convolutions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        audio = config.table("audio_config").values
        lengths, strides = audio.get("conv_kernel"), audio.get("conv_stride")
        token = config.integer("audio_token_id", default=10289, minimum=0)
        return cls(
            **one_token(texts.get("audio_token", "<extra_id_1>"), token),
            num_mels=1,
            most_frames=MOST_OMNIASR_SECONDS * RATE,
            convolutions=tuple(zip(lengths or _LENGTHS, strides or _STRIDES, strict=True)),
        )

    def count(self, grid: Grid) -> int:
        return num_convolved_samples(grid[0], self.convolutions)

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
