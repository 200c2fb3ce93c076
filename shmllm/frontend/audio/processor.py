"""Sounds of one model: what becomes of their samples.

`AudioProcessor` must not know where sounds come from and how they reach the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError
from shmllm.formats.audio_readers import read_audio_settings
from shmllm.formats.audio_settings import (
    AudioSettings,
    FunAsrSettings,
    Gemma4AudioSettings,
    GraniteSpeechSettings,
    ParakeetSettings,
    SamplesSettings,
    UnpaddedSettings,
    WaveSettings,
    WhisperSettings,
)
from shmllm.formats.processor_files import missing_settings
from shmllm.frontend.audio import features, gemma4_features, kaldi_features, parakeet_features
from shmllm.frontend.audio.opening import open_audio
from shmllm.frontend.audio.resampling import resampled
from shmllm.frontend.audio.sound import Sound
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.processor import NO_OVERRIDES, ItemProcessor
from shmllm.frontend.placeholders.family import AudioPlaceholder

_TRUNCATION = "truncation"
_FEATURES: dict[type[AudioSettings], Callable[[Any, Any], NDArray[np.float32]]] = {
    WhisperSettings: features.log_mel,
    UnpaddedSettings: features.unpadded_log_mel,
    Gemma4AudioSettings: gemma4_features.log_mel,
    GraniteSpeechSettings: features.stacked_log_mel,
    FunAsrSettings: kaldi_features.log_mel,
    SamplesSettings: features.samples_of_frames,
    WaveSettings: features.samples_alone,
    ParakeetSettings: parakeet_features.log_mel,
}
"""What computes features of samples, by the kind of extractor."""


class AudioProcessor(ItemProcessor[Sound]):
    """
    Args:
        settings: those of the model's feature extractor.
        placeholder: what stands for a sound in a prompt.

    Raises:
        EngineStartError: the settings do not suit the model.
    """

    def __init__(self, settings: AudioSettings, placeholder: AudioPlaceholder) -> None:
        super().__init__(placeholder)
        settings = placeholder.adapted(settings)
        placeholder.check_settings(settings)
        self._settings = settings
        self._count = placeholder.count
        self._divides, self._fills = placeholder.divides, placeholder.fills
        self._divides_samples = placeholder.divides_samples
        self._counts_parts = placeholder.counts_parts
        self._frames_behind = placeholder.frames_behind

    @classmethod
    def of_model(cls, directory: Path, placeholder: AudioPlaceholder) -> Self:
        settings = read_audio_settings(directory)
        if settings is None:
            raise missing_settings("sounds", directory, are_optional=placeholder.is_optional)
        return cls(settings, placeholder)

    @property
    def most_seconds(self) -> int:
        """The length of the longest sound."""
        return self._settings.most_seconds

    @property
    def known_overrides(self) -> frozenset[str]:
        return frozenset({_TRUNCATION})

    def open(self, name: str, value: Any) -> Sound:
        """The sound has the model's rate; soxr converts others."""
        rate = self._settings.rate
        return resampled(open_audio(name, value, rate), rate, name)

    def size(self, opened: Sound) -> tuple[int, ...]:
        return (len(opened.samples),)

    def identity(
        self, opened: Sound, overrides: Mapping[str, Any] = NO_OVERRIDES, name: str = "the sound"
    ) -> bytes:
        samples = self._heard(opened, overrides, name)
        digest = hashlib.sha256(hashlib.sha256(repr(self._settings).encode()).digest())
        digest.update(samples.tobytes())
        return digest.digest()

    def prepare(
        self, opened: Sound, overrides: Mapping[str, Any] = NO_OVERRIDES, name: str = "the sound"
    ) -> PreparedItem:
        samples, most = self._heard(opened, overrides, name), self._settings.most_samples
        if self._divides and not self._divides_samples:
            return self._divided(samples)
        if self._divides:
            pieces = [samples[first : first + most] for first in range(0, len(samples), most)]
            prepared = [self._prepared(piece, number) for number, piece in enumerate(pieces, 1)]
            parts = [part for part in prepared if part.num_tokens]
            whole = PreparedItem.of_parts(parts, (len(parts), 1, 1))
        else:
            whole = self._prepared(samples)
        if not whole.num_tokens:
            raise RequestError(
                f"{name} is too short: it has {len(samples)} samples at {self._settings.rate} Hz"
            )
        return whole

    def _prepared(self, samples: Any, number: int = 1) -> PreparedItem:
        """A sound that the tower hears at once, perhaps a part of one. One that is too short has no
        embeddings."""
        settings, behind = self._settings, self._frames_behind
        silence = 0, settings.most_samples - len(samples)
        if self._fills:
            samples = np.pad(samples, silence)
        part = number if self._counts_parts else 1
        grid = (settings.count_frames(len(samples)), part, 1)
        count = self._count(grid)
        if not count:
            return PreparedItem(np.empty(0, np.float32), grid, 0)
        if behind is None:
            samples = np.pad(samples, silence)
        found = _FEATURES[type(settings)](samples, settings)
        found = found[: None if behind is None else grid[0] + behind]
        found.flags.writeable = False
        return PreparedItem(found, grid, count)

    def _divided(self, samples: Any) -> PreparedItem:
        """All parts of a sound, the last one with silence behind the end."""
        settings = self._settings
        padded = np.pad(samples, (0, -len(samples) % settings.most_samples))
        found = _FEATURES[type(settings)](padded, settings)
        found = found.reshape(-1, settings.most_frames, settings.num_mels)
        found.flags.writeable = False
        grid = (settings.most_frames, 1, 1)
        parts = [PreparedItem(part, grid, self._count(grid)) for part in found]
        return PreparedItem.of_parts(parts, (len(parts), 1, 1))

    def _heard(self, sound: Sound, overrides: Mapping[str, Any], name: str) -> Any:
        """The samples of which features are made."""
        for key, value in overrides.items():
            if key != _TRUNCATION or not isinstance(value, bool):
                raise RequestError(
                    f"{name}: mm_processor_kwargs may have {_TRUNCATION!r} with True or False for "
                    f"sounds, not {key!r} with {value!r}",
                    parameter="mm_processor_kwargs",
                    value=key,
                )
        most = self._settings.most_samples
        if overrides.get(_TRUNCATION):
            return sound.samples[:most]
        if len(sound.samples) > most and not self._divides:
            seconds = self._settings.most_seconds
            raise RequestError(
                f"{name} has {sound.seconds:,.1f} seconds, and the model hears {seconds} at once: "
                f"cut it, or pass mm_processor_kwargs={{{_TRUNCATION!r}: True}} for the first "
                f"{seconds}"
            )
        return sound.samples
