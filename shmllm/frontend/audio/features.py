"""Log-mel features of sounds, as Whisper has them (Radford et al., 2022, section 2.2).

They are those of transformers' `WhisperFeatureExtractor` for a sound with zeros behind it, up to
the rounding of sums, without the frames that only contain zeros. Those of Granite Speech have other
filters and lengths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shmllm.formats.audio_settings import (
    FRAMES_BEHIND,
    GraniteSpeechSettings,
    SamplesSettings,
    UnpaddedSettings,
    WaveSettings,
    WhisperSettings,
)
from shmllm.frontend.audio.filters import htk_corners, slaney_filters, triangles

_HIGHEST = 8000.0
"""Hertz: up to where the filters reach."""
_FLOOR = 1e-10
_AT_ONCE = 3000
"""How many frames are in memory at a time."""
_RANGE = 8.0
"""By how many powers of ten the loudest feature may exceed the others."""


def log_mel(samples: NDArray[np.float32], settings: WhisperSettings) -> NDArray[np.float32]:
    """Computes features.

    Args:
        samples: [n], with the rate of the settings.
        settings: those of the extractor.

    Returns:
        [frames, num_mels]: those of the sound and FRAMES_BEHIND, but none behind the last part of
        `settings.most_frames`.
    """
    num_parts = -(-len(samples) // settings.most_samples)
    count = settings.count_frames(len(samples)) + FRAMES_BEHIND
    whole = np.zeros(num_parts * settings.most_samples, np.float32)
    whole[: len(samples)] = samples
    return _log_mel(whole, min(count, num_parts * settings.most_frames), settings)


def unpadded_log_mel(
    samples: NDArray[np.float32], settings: UnpaddedSettings
) -> NDArray[np.float32]:
    """As `log_mel`, of a sound with nothing behind it: [frames, num_mels]."""
    count = settings.count_frames(len(samples))
    whole = np.pad(samples, (0, max(0, settings.fewest - len(samples))))
    return _log_mel(whole, count, settings)


def samples_of_frames(
    samples: NDArray[np.float32], settings: SamplesSettings
) -> NDArray[np.float32]:
    """The samples themselves, [frames, num_mels], with zeros behind the last one."""
    filled = np.pad(samples, (0, -len(samples) % settings.hop))
    return np.ascontiguousarray(filled.reshape(-1, settings.hop), np.float32)


def samples_alone(samples: NDArray[np.float32], settings: WaveSettings) -> NDArray[np.float32]:
    """The samples themselves, [samples, 1]."""
    if settings.normalizes:
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + settings.least_variance)
    return np.array(samples[:, None], np.float32)


def _log_mel(
    whole: NDArray[np.float32], count: int, settings: WhisperSettings
) -> NDArray[np.float32]:
    """The first frames of samples, which are mirrored at both ends."""
    window = _hann(settings.window)
    filters = slaney_filters(settings.rate, settings.window, settings.num_mels, _HIGHEST)
    return _logs_of(whole, window, settings.hop, count, filters)


def stacked_log_mel(
    samples: NDArray[np.float32], settings: GraniteSpeechSettings
) -> NDArray[np.float32]:
    """Computes features as Granite Speech has them: [frames, num_mels]."""
    around = settings.fft - settings.window
    window = np.pad(_hann(settings.window), (around // 2, around - around // 2))
    count = len(samples) // settings.hop + 1
    found = _logs_of(samples, window, settings.hop, count, _htk_filters(settings))
    return found[: count // 2 * 2].reshape(-1, settings.num_mels)


def _logs_of(
    whole: NDArray[np.float32],
    window: NDArray[np.float64],
    hop: int,
    count: int,
    filters: NDArray[np.float64],
) -> NDArray[np.float32]:
    """The first frames of samples, which are mirrored at both ends, [count, filters]."""
    most, size = _AT_ONCE, len(window)
    padded = np.pad(whole, size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop][:count]
    logs = np.empty((count, filters.shape[1]), np.float32)
    for start in range(0, count, most):
        power = np.abs(np.fft.rfft(frames[start : start + most] * window)) ** 2
        logs[start : start + most] = np.log10(np.maximum(power @ filters, _FLOOR))
    features = (np.maximum(logs, logs.max() - _RANGE) + 4.0) / 4.0
    return np.ascontiguousarray(features, np.float32)


def _hann(size: int) -> NDArray[np.float64]:
    """The window of a periodic signal: the first zero of the next period is left out."""
    return np.hanning(size + 1)[:-1]


@lru_cache(maxsize=4)
def _htk_filters(settings: GraniteSpeechSettings) -> NDArray[np.float64]:
    """Triangles of the height 1, [fft / 2 + 1, num_filters]."""
    frequencies = np.linspace(0, settings.rate // 2, settings.fft // 2 + 1)
    return triangles(frequencies, htk_corners(0.0, settings.rate / 2, settings.num_filters))
