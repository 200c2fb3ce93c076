"""How many positions encoders make of sounds: what front ends and models both count."""

from __future__ import annotations

from collections.abc import Iterable

RATE = 16_000
"""The samples of a second of Moonshine."""
CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
"""The lengths and strides of Moonshine's convolutions."""


def num_convolved_samples(
    count: int, convolutions: Iterable[tuple[int, int]] = CONVOLUTIONS
) -> int:
    """Returns the number of positions behind convolutions of so many samples.

    Args:
        count: the number of samples.
        convolutions: their lengths and strides; by default Moonshine's.
    """
    for length, stride in convolutions:
        count = max(0, (count - length) // stride + 1)
    return count


def num_halved(count: int, times: int) -> int:
    """Returns the number of positions behind convolutions that read every other one."""
    for _ in range(times):
        count = (count + 1) // 2
    return count
