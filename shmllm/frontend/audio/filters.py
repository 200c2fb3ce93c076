"""What log-mel features have in common: filters that are triangles over the frequencies."""

from __future__ import annotations

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
