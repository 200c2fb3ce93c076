"""Changes the sampling rate of sounds with soxr, which is imported with the first such sound."""

from __future__ import annotations

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.audio.sound import Sound, check_length

QUALITY = "HQ"
"""What librosa uses by default, and with it vLLM."""


def resampled(sound: Sound, rate: int, name: str = "the sound") -> Sound:
    """The sound with another sampling rate; the sound itself if it has it.

    Args:
        sound: the sound.
        rate: in Hz.
        name: the sound's name for messages.

    Raises:
        RequestError: the result would have more than MOST_SAMPLES samples, or none.
    """
    if sound.rate == rate:
        return sound
    expected = len(sound.samples) * rate // sound.rate
    if expected:
        check_length(name, expected, rate)
        import soxr

        samples = np.ascontiguousarray(soxr.resample(sound.samples, sound.rate, rate, QUALITY))
        if len(samples):
            return Sound(samples.astype(np.float32, copy=False), rate)
    raise RequestError(
        f"{name} has {len(sound.samples)} samples at {sound.rate:,} Hz, too few for one at {rate:,}"
    )
