"""How a model's files say that sounds become features: reads the settings of feature extractors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.audio_settings import (
    MOST_OMNIASR_SECONDS,
    MOST_PARAKEET_FRAMES,
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
from shmllm.formats.processor_files import read_section

_LARGEST = 2**20


def read_audio_settings(directory: Path) -> AudioSettings | None:
    """Reads the settings of the feature extractor in a model's directory.

    Returns:
        None if the directory has none.

    Raises:
        EngineStartError: a file cannot be read, a field has a wrong type, or the settings are not
            supported.
    """
    sections = (read_section(directory, name) for name in ("feature_extractor", "audio_processor"))
    found = next((each for each in sections if each is not None), None)
    if found is None:
        return None
    values, path = found
    if not isinstance(values, dict):
        raise EngineStartError(f"{path}: the feature extractor must be an object, not {values!r}")
    kind = values.get("feature_extractor_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(_READERS)
        raise EngineStartError(
            f"{path}: feature_extractor_type {kind!r} is not supported; supported is {known}"
        )
    for name, supported in _SUPPORTED.items():
        if name not in _COMPUTED.get(str(kind), ()) and values.get(name) not in (None, supported):
            raise EngineStartError(f"{path}: {name} must be {supported}, not {values[name]!r}")
    settings = reader(values, path)
    if settings.window > settings.most_samples:
        raise EngineStartError(
            f"{path}: frames of {settings.window:,} samples are longer than the longest sound, "
            f"which has {settings.most_samples:,}"
        )
    return settings


def _read_whisper(values: dict[str, Any], path: Path) -> WhisperSettings:
    settings = WhisperSettings(
        rate=_size(values, "sampling_rate", path, 16_000),
        num_mels=_size(values, "feature_size", path, 80),
        hop=_size(values, "hop_length", path, 160),
        window=_size(values, "n_fft", path, 400),
        seconds=_size(values, "chunk_length", path, 30),
    )
    if settings.hop > settings.window or settings.window % 2:
        raise EngineStartError(f"{path}: n_fft must be even, and at least hop_length")
    return settings


def _read_gemma4(values: dict[str, Any], path: Path) -> Gemma4AudioSettings:
    """transformers writes the lengths of frames in samples, but reads them in milliseconds."""
    rate = _size(values, "sampling_rate", path, 16_000)
    lengths = {}
    for name, default in (("frame_length", 20.0), ("hop_length", 10.0)):
        length = round(rate * _number(values, f"{name}_ms", path, default) / 1000)
        if not length or _size(values, name, path, length) != length:
            raise EngineStartError(
                f"{path}: {name} must be {length} samples, those of {name}_ms, and at least 1, not "
                f"{values.get(name)!r}"
            )
        lengths[name] = length
    lowest = _number(values, "min_frequency", path, 0.0)
    highest = _number(values, "max_frequency", path, 8000.0)
    if lowest >= highest:
        raise EngineStartError(
            f"{path}: max_frequency ({highest}) must be above min_frequency ({lowest})"
        )
    return Gemma4AudioSettings(
        rate=rate,
        num_mels=_size(values, "feature_size", path, 128),
        hop=lengths["hop_length"],
        window=lengths["frame_length"],
        lowest=lowest,
        highest=highest,
        floor=_number(values, "mel_floor", path, 1e-3),
    )


def _read_qwen3_asr(values: dict[str, Any], path: Path) -> UnpaddedSettings:
    whole = _read_whisper({"feature_size": 128} | values, path)
    found = values.get("min_length", 8000)
    if type(found) is not int or not 0 <= found < _LARGEST:
        raise EngineStartError(f"{path}: 'min_length' must be a number of samples, not {found!r}")
    return UnpaddedSettings(**asdict(whole) | {"fewest": found})


def _read_granite_speech(values: dict[str, Any], path: Path) -> GraniteSpeechSettings:
    num_filters = _size(values, "n_mels", path, 80)
    settings = GraniteSpeechSettings(
        rate=_size(values, "sampling_rate", path, 16_000),
        num_mels=2 * num_filters,
        num_filters=num_filters,
        hop=_size(values, "hop_length", path, 160),
        window=_size(values, "win_length", path, 400),
        fft=_size(values, "n_fft", path, 512),
        group=_size(values, "projector_window_size", path, 15),
        rate_of_group=_size(values, "projector_downsample_rate", path, 5),
    )
    if settings.window > settings.fft or settings.fft % 2:
        raise EngineStartError(f"{path}: n_fft must be even, and at least win_length")
    return settings


def _read_fun_asr(values: dict[str, Any], path: Path) -> FunAsrSettings:
    rate = _size(values, "sampling_rate", path, 16_000)
    num_filters = _size(values, "feature_size", path, 80)
    together = _size(values, "num_frames_lfr", path, 7)
    lengths = [
        int(rate * _size(values, name, path, default) * 0.001)
        for name, default in (("frame_length", 25), ("frame_shift", 10))
    ]
    if (window := values.get("window", "hamming")) != "hamming":
        raise EngineStartError(f"{path}: window must be 'hamming', not {window!r}")
    if min(lengths) < 2:
        raise EngineStartError(f"{path}: frame_length and frame_shift must be two samples or more")
    return FunAsrSettings(
        rate=rate,
        num_mels=num_filters * together,
        num_filters=num_filters,
        together=together,
        stride=_size(values, "stride_lfr", path, 6),
        window=lengths[0],
        hop=lengths[1],
    )


def _read_samples(values: dict[str, Any], path: Path) -> SamplesSettings:
    length = _size(values, "audio_samples_per_token", path, 640)
    if (size := _size(values, "feature_size", path, length)) != length:
        raise EngineStartError(
            f"{path}: feature_size ({size}) differs from audio_samples_per_token ({length})"
        )
    rate = _size(values, "sampling_rate", path, 16_000)
    return SamplesSettings(rate=rate, num_mels=length, hop=length, window=length)


def _read_wave(values: dict[str, Any], path: Path) -> WaveSettings:
    if (size := _size(values, "feature_size", path, 1)) != 1:
        raise EngineStartError(f"{path}: feature_size {size} is not supported; supported: 1")
    normalizes = values.get("do_normalize", True)
    if not isinstance(normalizes, bool):
        raise EngineStartError(f"{path}: 'do_normalize' must be true or false, not {normalizes!r}")
    rate = _size(values, "sampling_rate", path, 16_000)
    return WaveSettings(rate=rate, num_mels=1, hop=1, window=1, normalizes=normalizes)


def _read_omniasr(values: dict[str, Any], path: Path) -> WaveSettings:
    settings = _read_wave(values, path)
    return replace(settings, least_variance=1e-5, longest=MOST_OMNIASR_SECONDS)


def _read_parakeet(values: dict[str, Any], path: Path) -> ParakeetSettings:
    hop = _size(values, "hop_length", path, 160)
    settings = ParakeetSettings(
        rate=_size(values, "sampling_rate", path, 16_000),
        num_mels=_size(values, "feature_size", path, 80),
        hop=hop,
        window=_size(values, "win_length", path, 400),
        fft=_size(values, "n_fft", path, 512),
        emphasis=_number(values, "preemphasis", path, 0.0 if "preemphasis" in values else 0.97),
        dither=0.0,
        longest=MOST_PARAKEET_FRAMES * hop,
    )
    if settings.window > settings.fft or settings.fft % 2:
        raise EngineStartError(f"{path}: n_fft must be even, and at least win_length")
    return settings


def _read_cohere_asr(values: dict[str, Any], path: Path) -> ParakeetSettings:
    settings = _read_parakeet({"feature_size": 128} | values, path)
    seconds = _number(values, "max_audio_clip_s", path, 35.0)
    return replace(
        settings,
        dither=_number(values, "dither", path, 1e-5),
        longest=min(settings.longest, round(seconds * settings.rate)),
    )


_READERS: dict[str, Callable[[dict[str, Any], Path], AudioSettings]] = {
    "WhisperFeatureExtractor": _read_whisper,
    "Gemma4AudioFeatureExtractor": _read_gemma4,
    "Gemma4UnifiedAudioFeatureExtractor": _read_samples,
    "MossTranscribeDiarizeFeatureExtractor": _read_whisper,
    "Qwen3ASRFeatureExtractor": _read_qwen3_asr,
    "GraniteSpeechFeatureExtractor": _read_granite_speech,
    "FunAsrNanoFeatureExtractor": _read_fun_asr,
    "OmniASRFeatureExtractor": _read_omniasr,
    "ParakeetFeatureExtractor": _read_parakeet,
    "CohereAsrFeatureExtractor": _read_cohere_asr,
    "Wav2Vec2FeatureExtractor": _read_wave,
}
"""By the names of transformers' classes. A file may leave fields out; then the defaults of the
class count."""
_SUPPORTED: dict[str, Any] = {
    "dither": 0,
    "padding_value": 0,
    "preemphasis": 0,
    "fft_overdrive": False,
    "input_scale_factor": 1,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""Fields that have one supported value, but for extractors in _COMPUTED."""
_COMPUTED = {
    "ParakeetFeatureExtractor": ("preemphasis",),
    "CohereAsrFeatureExtractor": ("preemphasis", "dither"),
}


def _size(values: dict[str, Any], name: str, path: Path, default: int) -> int:
    value = default if values.get(name) is None else values[name]
    if type(value) is not int or not 0 < value < _LARGEST:
        raise EngineStartError(f"{path}: {name!r} must be a positive integer, not {value!r}")
    return value


def _number(values: dict[str, Any], name: str, path: Path, default: float) -> float:
    value = default if values.get(name) is None else values[name]
    if type(value) not in (int, float) or not 0 <= value < _LARGEST:
        raise EngineStartError(f"{path}: {name!r} must be a number of at least 0, not {value!r}")
    return float(value)
