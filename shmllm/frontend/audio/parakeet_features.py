"""Log-mel features of sounds, as Parakeet has them: those of transformers'
`ParakeetFeatureExtractor` and `CohereAsrFeatureExtractor`, computed in float64, without the frames
that are masked."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shmllm.formats.audio_settings import ParakeetSettings
from shmllm.frontend.audio.filters import slaney_filters

_FLOOR = 2.0**-24
"""Added to the power of a filter before its logarithm."""
_LEAST_DEVIATION = 1e-5
"""Added to the standard deviation of a feature."""
_BLOCK = 16
"""torch makes so many normal numbers at a time: a half from the other one's angles."""


def log_mel(samples: NDArray[np.float32], settings: ParakeetSettings) -> NDArray[np.float32]:
    """Computes features, each of which has the mean 0 and the variance 1 over a sound.

    Args:
        samples: [n], with the rate of the settings.
        settings: those of the extractor.

    Returns:
        [frames, num_mels].
    """
    count, fft = settings.count_frames(len(samples)), settings.fft
    if settings.dither > 0:
        noise = torch_normals(len(samples), seed=len(samples))
        samples = samples + np.float32(settings.dither) * noise
    before = np.float32(settings.emphasis) * samples[:-1]
    emphasized = np.concatenate([samples[:1], samples[1:] - before])
    padded = np.pad(emphasized, fft // 2)
    around = fft - settings.window
    window = np.pad(np.hanning(settings.window), (around // 2, around - around // 2))
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft)[:: settings.hop][:count]
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    filters = slaney_filters(settings.rate, fft, settings.num_mels, settings.rate / 2)
    logs = np.log(power @ filters + _FLOOR)
    deviations = logs.std(0, ddof=1) + _LEAST_DEVIATION
    return np.ascontiguousarray((logs - logs.mean(0)) / deviations, np.float32)


def torch_normals(count: int, seed: int) -> NDArray[np.float32]:
    """Returns the normal numbers that torch's generator on a CPU makes with a seed, up to rounding:
    Mersenne Twister (Matsumoto and Nishimura, 1998) and the transform of Box and Muller (1958).

    Args:
        count: their number, at least 16.
        seed: the seed.

    Returns:
        [count] float32.
    """
    bits, state = np.random.MT19937(), np.random.RandomState(seed).get_state(legacy=False)
    bits.state = cast("Any", state)

    def uniform(size: int) -> NDArray[np.float32]:
        raw = bits.random_raw(size).astype(np.uint32) & np.uint32(2**24 - 1)
        return raw.astype(np.float32) * np.float32(2**-24)

    found = uniform(count)
    whole = count // _BLOCK * _BLOCK
    found[:whole] = _normal(found[:whole])
    if count > whole:
        found[-_BLOCK:] = _normal(uniform(_BLOCK))
    return found


def _normal(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normal numbers of uniform ones, whose number is a multiple of _BLOCK."""
    pairs = uniform.reshape(-1, 2, _BLOCK // 2)
    radii = np.sqrt(-2 * np.log(1 - pairs[:, 0]))
    angles = np.float32(2 * np.pi) * pairs[:, 1]
    found: NDArray[np.float32] = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)
    return found.reshape(-1)
