"""MOSS-Transcribe-Diarize: audio tokens, among which the seconds are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shmllm.formats.audio_settings import AudioSettings
from shmllm.formats.processor_files import PROCESSOR
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.qwen2_audio import AudioFlamingoPlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class MossPlaceholder(AudioFlamingoPlaceholder):
    """Of transformers' `MossTranscribeDiarizeProcessor`. The tower reads the silence behind a part,
    too.

    Attributes:
        factor: how many positions, of two frames each, become an embedding.
        chunk: the samples of a part.
        every: a number follows each so many seconds; 0: none does.
        tokens_per_second: how many embeddings a second has.
    """

    frames_behind: ClassVar[int | None] = None
    DEFAULT_ID: ClassVar[int] = 151671
    BEGIN: ClassVar[str] = "<|audio_start|>"
    TOKEN: ClassVar[str] = "<|audio_pad|>"
    END: ClassVar[str] = "<|audio_end|>"
    NUM_MELS: ClassVar[int] = 80

    factor: int = 4
    chunk: int = 480_000
    every: int = 2
    tokens_per_second: float = 12.5

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        own = Config(config.processor, PROCESSOR)
        rate = own.values.get("audio_tokens_per_second", 12.5)
        if type(rate) not in (int, float) or not 0 < rate < 1000:
            raise own.error(f"'audio_tokens_per_second' must be a positive number, not {rate!r}")
        factor = config.integer("audio_merge_size", default=4)
        if (found := own.integer("audio_merge_size", default=4)) != factor:
            raise own.error(f"audio_merge_size ({found}) differs from config.json's ({factor})")
        return replace(
            super().of(config, texts),
            factor=factor,
            chunk=config.integer("audio_chunk_size", default=480_000),
            every=own.integer("time_marker_every_seconds", default=2, minimum=0),
            tokens_per_second=float(rate),
        )

    def check_settings(self, settings: AudioSettings) -> None:
        super().check_settings(settings)
        if settings.most_samples != self.chunk:
            raise Config({}).error(
                f"audio_chunk_size is {self.chunk}, and parts of the feature extractor have "
                f"{settings.most_samples} samples"
            )

    def count(self, grid: Grid) -> int:
        return -(-((grid[0] + 1) // 2) // self.factor)

    def expansion(self, item: PreparedItem) -> str:
        size, count = int(self.tokens_per_second * self.every), item.num_tokens
        if not size:
            return self.token * count
        seconds = range(self.every, int(count / self.tokens_per_second) + 1, self.every)
        texts = [f"{self.token * size}{second}" for second in seconds]
        return "".join([*texts, self.token * (count - size * len(texts))])
