"""Log-mel features of sounds, as Kaldi has them (Povey et al., 2011), several frames in one.

They are those of transformers' `FunAsrNanoFeatureExtractor`, which computes them by torchaudio
(`compliance.kaldi.fbank`), up to the rounding of sums.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shmllm.formats.audio_settings import FunAsrSettings
from shmllm.frontend.audio.filters import triangles

_LOWEST = 20.0
"""Hertz: from where on the filters reach, up to half the rate."""
_EMPHASIS = 0.97
"""The part of the sample before that is subtracted from each one."""
_FLOOR = float(np.finfo(np.float32).eps)
_AT_ONCE = 3000
"""How many frames are in memory at a time."""


def log_mel(samples: NDArray[np.float32], settings: FunAsrSettings) -> NDArray[np.float32]:
    """Computes features.

    Args:
        samples: [n], at least one frame of Kaldi's, with the rate of the settings.
        settings: those of the extractor.

    Returns:
        [frames, num_mels].
    """
    found = _log_mel(samples, settings)
    together, stride = settings.together, settings.stride
    count, before = settings.count_frames(len(samples)), (together - 1) // 2
    places = np.arange(count)[:, None] * stride + np.arange(together) - before
    stacked = found[np.clip(places, 0, len(found) - 1)]  # the first and the last one are repeated
    return np.ascontiguousarray(stacked.reshape(count, -1), np.float32)


def _log_mel(samples: NDArray[np.float32], settings: FunAsrSettings) -> NDArray[np.float32]:
    """Kaldi's frames, [frames, num_filters]."""
    count, size = settings.count_of_kaldi(len(samples)), settings.window
    frames = np.lib.stride_tricks.sliding_window_view(samples, size)[:: settings.hop][:count]
    logs = np.empty((count, settings.num_filters), np.float32)
    for start in range(0, count, _AT_ONCE):
        some = frames[start : start + _AT_ONCE].astype(np.float64)
        some -= some.mean(1, keepdims=True)
        some -= _EMPHASIS * np.concatenate([some[:, :1], some[:, :-1]], 1)
        power = np.abs(np.fft.rfft(some * np.hamming(size), n=_fft_length(settings))) ** 2
        logs[start : start + _AT_ONCE] = np.log(np.maximum(power @ _filters(settings), _FLOOR))
    return logs


def _fft_length(settings: FunAsrSettings) -> int:
    """The next power of two from the window on."""
    return 1 << (settings.window - 1).bit_length()


@lru_cache(maxsize=4)
def _filters(settings: FunAsrSettings) -> NDArray[np.float64]:
    """Triangles over the mels of frequencies, [frequencies, num_filters]; the highest frequency is
    in none."""
    highest = settings.rate / 2
    mels = _mel(np.linspace(0, highest, _fft_length(settings) // 2 + 1))
    ends = _mel(np.array([_LOWEST, highest]))
    filters = triangles(mels, np.linspace(ends[0], ends[1], settings.num_filters + 2))
    filters[-1] = 0
    return filters


def _mel(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1127.0 * np.log(1.0 + hertz / 700.0)
