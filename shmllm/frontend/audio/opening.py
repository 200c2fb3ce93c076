"""Makes sounds with one channel of what users give: samples with their rate, encoded files.

An error of a sound is one RequestError with the sound's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError

MOST_SAMPLES = 2**28
"""The most samples of all channels; at 48 kHz an hour and a half of one."""
MOST_CHANNELS = 32
MOST_RATE = 2**20


@dataclass(frozen=True, slots=True)
class Sound:
    """
    Attributes:
        samples: float32 [n], most of them between -1 and 1.
        rate: the samples of a second.
    """

    samples: NDArray[np.float32]
    rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.rate


def open_audio(name: str, value: Any, rate: int) -> Sound:
    """Makes a sound of what a user gives.

    Args:
        name: the sound's name for messages, such as "prompt 3: audio 1".
        value: encoded bytes; samples as a numpy array, torch tensor or list; or a tuple of such
            samples and their rate. Samples are floating-point numbers, or integers of which the
            largest one of their type stands for 1. They have the shape [samples], or a second
            dimension of channels, which may come first: the smaller one is that of channels.
        rate: that of samples which come without one.

    Raises:
        RequestError: `value` is something else, or cannot be decoded.
    """
    if isinstance(value, Sound):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return open_bytes(name, bytes(value))
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value[0], _checked_rate(name, value[1])
    return Sound(_samples_of(name, value), rate)


def open_bytes(name: str, data: bytes) -> Sound:
    """Decodes an encoded sound: WAV, FLAC, OGG, MP3 and what else libsndfile reads.

    Raises:
        RequestError: the data are empty, damaged or of an unknown format, or too long.
    """
    if not data:
        raise RequestError(f"{name} is empty (0 bytes)")
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            rate, channels, frames = file.samplerate, file.channels, file.frames
            _check_size(name, frames, channels)
            _checked_rate(name, rate)
            samples = file.read(frames, dtype="float32", always_2d=True)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"{name} cannot be decoded: {error}; known are WAV, FLAC, OGG and MP3. Is it damaged?"
        ) from None
    return Sound(_checked(name, samples.mean(1)), rate)


def _samples_of(name: str, value: Any) -> NDArray[np.float32]:
    if not hasattr(value, "dtype") and not isinstance(value, list):
        raise RequestError(
            f"{name} must be samples (a numpy array, torch tensor or list), a tuple of samples and "
            f"their rate, or encoded bytes, not {type(value).__name__}"
        )
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} does not consist of samples: {error}") from None
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiu":
        raise RequestError(
            f"{name}: samples must be numbers of shape [samples] or [samples, channels], not "
            f"{array.dtype} of shape {list(array.shape)}"
        )
    if array.ndim == 2 and array.shape[0] < array.shape[1]:
        array = array.T
    _check_size(name, len(array), array.shape[1] if array.ndim == 2 else 1)
    scaled = _scaled(array)
    return _checked(name, scaled.mean(1) if scaled.ndim == 2 else scaled)


def _scaled(array: NDArray[Any]) -> NDArray[np.float32]:
    """The samples as floating-point numbers. Bytes without a sign lie around 128, as in WAV."""
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    half = 2.0 ** (8 * array.dtype.itemsize - 1)
    offset = half if array.dtype.kind == "u" else 0.0
    return ((array.astype(np.float64) - offset) / half).astype(np.float32)


def _check_size(name: str, frames: int, channels: int) -> None:
    if not 1 <= channels <= MOST_CHANNELS:
        raise RequestError(f"{name} has {channels} channels; 1 to {MOST_CHANNELS} are supported")
    if frames < 1:
        raise RequestError(f"{name} has no samples")
    if frames * channels > MOST_SAMPLES:
        raise RequestError(
            f"{name} has {frames * channels:,} samples, more than {MOST_SAMPLES:,}; cut it"
        )


def _checked(name: str, samples: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(samples).all():
        raise RequestError(f"{name} has samples that are no finite numbers")
    return np.ascontiguousarray(samples, np.float32)


def _checked_rate(name: str, rate: Any) -> int:
    is_number = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if not is_number or not math.isfinite(rate) or not 1 <= rate <= MOST_RATE or rate != int(rate):
        raise RequestError(f"{name}: the rate must be the samples of a second, not {rate!r}")
    return int(rate)
