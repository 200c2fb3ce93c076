"""Divides a sound into windows that a model hears at once.

A sound that is too long is cut where it is quietest near the end of a window, so that words stay
whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SEARCHED_SECONDS = 5
"""How far before the end of a window the quietest place is searched."""
_LEAST_OF_SECOND = 10
"""The last window is longer than this part of a second: models have a shortest sound."""
_FRAMES_PER_SECOND = 50
_LOUDNESS_FRAMES = 5
"""The loudness of a place is that of so many frames around it."""


class Window(NamedTuple):
    """A part of a sound.

    start: where it begins, in seconds.
    samples: float32 [n], a view.
    """

    start: float
    samples: NDArray[np.float32]


def divide(samples: NDArray[np.float32], rate: int, most_seconds: int) -> list[Window]:
    """The windows of a sound, which together are the sound.

    Args:
        samples: float32 [n].
        rate: samples in a second.
        most_seconds: the length of the longest window.
    """
    most, first = most_seconds * rate, 0
    windows = []
    while len(samples) - first > most:
        end = first + most
        begin = end - min(_SEARCHED_SECONDS * rate, most // 2)
        last = min(end, len(samples) - rate // _LEAST_OF_SECOND)
        cut = begin + _quietest(samples[begin:last], rate)
        windows.append(Window(first / rate, samples[first:cut]))
        first = cut
    windows.append(Window(first / rate, samples[first:]))
    return windows


def _quietest(samples: NDArray[np.float32], rate: int) -> int:
    """The middle of the quietest place of a sound, of several the last one."""
    size = max(rate // _FRAMES_PER_SECOND, 1)
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    energy = np.square(frames, dtype=np.float64).sum(1)
    around = np.convolve(energy, np.ones(_LOUDNESS_FRAMES), "same")
    place = len(around) - 1 - int(np.argmin(around[::-1]))
    return place * size + size // 2
