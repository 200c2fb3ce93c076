"""How a model's files say that sounds become features: the settings of Whisper's extractor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.processor_files import read_section

FRAMES_BEHIND = 2
"""How many frames behind a sound the convolutions of Whisper's encoder read."""
_EXTRACTOR = "WhisperFeatureExtractor"
_DEFAULTS = {
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
}
"""What transformers' class has where a file is silent."""
_LARGEST = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSettings:
    """The settings of a feature extractor.

    Attributes:
        rate: the samples of a second.
        num_mels: the features of a frame.
        hop: the samples from one frame to the next.
        window: the samples of a frame.
        most_seconds: the longest sound.
    """

    rate: int
    num_mels: int
    hop: int
    window: int
    most_seconds: int

    @property
    def most_samples(self) -> int:
        return self.rate * self.most_seconds

    @property
    def most_frames(self) -> int:
        return self.most_samples // self.hop


def read_audio_settings(directory: Path) -> AudioSettings | None:
    """Reads the settings of the feature extractor in a model's directory.

    Returns:
        None if the directory has none.

    Raises:
        EngineStartError: a file cannot be read, a field has a wrong type, or the settings are not
            supported.
    """
    found = read_section(directory, "feature_extractor")
    if found is None:
        return None
    values, path = found
    if not isinstance(values, dict):
        raise EngineStartError(f"{path}: the feature extractor must be an object, not {values!r}")
    kind = values.get("feature_extractor_type")
    if kind != _EXTRACTOR:
        raise EngineStartError(
            f"{path}: feature_extractor_type {kind!r} is not supported; supported is {_EXTRACTOR}"
        )
    for name in ("dither", "padding_value"):
        if values.get(name) not in (None, 0):
            raise EngineStartError(f"{path}: {name} must be 0, not {values[name]!r}")
    fields = {name: _size(values, name, path) for name in _DEFAULTS}
    if fields["hop_length"] > fields["n_fft"] or fields["n_fft"] % 2:
        raise EngineStartError(f"{path}: n_fft must be even, and at least hop_length")
    return AudioSettings(
        rate=fields["sampling_rate"],
        num_mels=fields["feature_size"],
        hop=fields["hop_length"],
        window=fields["n_fft"],
        most_seconds=fields["chunk_length"],
    )


def _size(values: dict[str, Any], name: str, path: Path) -> int:
    value = values.get(name)
    if value is None:
        return _DEFAULTS[name]
    if type(value) is not int or not 0 < value < _LARGEST:
        raise EngineStartError(f"{path}: {name!r} must be a positive integer, not {value!r}")
    return value
