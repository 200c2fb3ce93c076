"""What log-mel features have in common: filters that are triangles over the frequencies."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def htk_corners(lowest: float, highest: float, count: int) -> NDArray[np.float64]:
    """Returns the corners of filters that have equal widths in mels, which are HTK's (Young et al.,
    The HTK Book).

    Args:
        lowest, highest: where the first one begins, and where the last one ends, in Hertz.
        count: the number of filters.

    Returns:
        [count + 2], in Hertz.
    """
    mels = np.linspace(_htk_mel(lowest), _htk_mel(highest), count + 2)
    return 700.0 * (10.0 ** (mels / 2595.0) - 1.0)


def _htk_mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


def triangles(
    frequencies: NDArray[np.float64], corners: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns filters of the height 1.

    Args:
        frequencies: [n], in Hertz.
        corners: [filters + 2], in Hertz, ascending: a filter begins at one, is highest at the
            next one, and ends at the one behind that.

    Returns:
        [n, filters].
    """
    widths = np.diff(corners)
    distances = corners - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    filters: NDArray[np.float64] = np.maximum(np.minimum(rising, falling), 0)
    return filters


@lru_cache(maxsize=4)
def slaney_filters(rate: int, fft: int, count: int, highest: float) -> NDArray[np.float64]:
    """Returns triangles of equal areas over the frequencies of a frame (Slaney's Auditory Toolbox,
    1998), [fft / 2 + 1, count].

    Args:
        rate: the samples of a second.
        fft: the length of Fourier transforms.
        count: the number of filters.
        highest: up to where they reach, in Hertz.
    """
    frequencies = np.linspace(0, rate // 2, fft // 2 + 1)
    corners = _hertz(np.linspace(0, _mel(highest), count + 2))
    return triangles(frequencies, corners) * (2 / (corners[2:] - corners[:-2]))


_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
"""Up to here 200 Hz are 3 mels; further up each octave has as many."""
_LOG_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * 3 / 200
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HERTZ) / _LOG_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * 200 / 3, above)
