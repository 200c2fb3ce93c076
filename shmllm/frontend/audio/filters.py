"""What log-mel features have in common: filters that are triangles over the frequencies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
