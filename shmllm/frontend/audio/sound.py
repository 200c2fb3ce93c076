"""A sound, and the limits that hold for every one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError

MOST_SAMPLES = 2**26
"""The largest number of samples of one channel; 256 MiB, and 70 minutes at 16,000 Hz."""
MOST_RATE = 1_000_000
"""The highest sampling rate, in Hz. soxr makes nothing of much higher ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A sound with one channel.

    Attributes:
        samples: float32 [n], contiguous and finite, n at least 1. Full scale is -1 to 1.
        rate: samples in a second.
    """

    samples: NDArray[np.float32]
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def whole_rate(name: str, rate: Any) -> int:
    """A sampling rate that a user gives, as an int.

    Raises:
        RequestError: it is no whole number from 1 to MOST_RATE.
    """
    number = isinstance(rate, int | float | np.integer | np.floating) and type(rate) is not bool
    if not number or not math.isfinite(rate) or not 1 <= rate <= MOST_RATE or rate != int(rate):
        raise RequestError(
            f"{name}: the sampling rate must be a whole number of Hz from 1 to {MOST_RATE:,}, not "
            f"{str(rate)[:40]!r}"
        )
    return int(rate)


def check_length(name: str, num_samples: int, rate: int) -> None:
    """Raises RequestError if a sound has more than MOST_SAMPLES samples in a channel, or none."""
    if num_samples < 1:
        raise RequestError(f"{name} has no samples")
    if num_samples > MOST_SAMPLES:
        raise RequestError(
            f"{name} has {num_samples:,} samples ({num_samples / rate:,.1f} s at {rate:,} Hz), "
            f"more than {MOST_SAMPLES:,}; cut it"
        )
