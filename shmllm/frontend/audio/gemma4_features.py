"""Log-mel features of sounds, as Gemma 4 has them: those of transformers'
`Gemma4AudioFeatureExtractor`, without the frames that are masked."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shmllm.formats.audio_settings import Gemma4AudioSettings
from shmllm.frontend.audio.filters import htk_corners, triangles


def log_mel(samples: NDArray[np.float32], settings: Gemma4AudioSettings) -> NDArray[np.float32]:
    """Computes features.

    Args:
        samples: [n], at most `settings.most_samples`, with the rate of the settings.
        settings: those of the extractor.

    Returns:
        [frames, num_mels].
    """
    count = settings.count_frames(len(samples))
    if not count:
        return np.zeros((0, settings.num_mels), np.float32)
    padded = np.pad(samples, (settings.num_before, 0))
    frames = np.lib.stride_tricks.sliding_window_view(padded, settings.window)
    windowed = frames[:: settings.hop][:count] * _hann(settings.window)
    magnitudes = np.abs(np.fft.rfft(windowed, n=_fft_length(settings)))
    features = np.log(magnitudes @ _filters(settings) + settings.floor)
    return np.ascontiguousarray(features, np.float32)


def _hann(size: int) -> NDArray[np.float32]:
    return np.hanning(size + 1)[:-1].astype(np.float32)


def _fft_length(settings: Gemma4AudioSettings) -> int:
    """The next power of two from the window on."""
    return 1 << (settings.window - 1).bit_length()


@lru_cache(maxsize=4)
def _filters(settings: Gemma4AudioSettings) -> NDArray[np.float64]:
    """[frequencies, num_mels]."""
    frequencies = np.linspace(0, settings.rate // 2, _fft_length(settings) // 2 + 1)
    corners = htk_corners(settings.lowest, settings.highest, settings.num_mels)
    return triangles(frequencies, corners)
