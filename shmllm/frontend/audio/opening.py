"""Makes mono sounds of what users give: arrays and tensors, with or without a rate, encoded bytes.

Channels are averaged. An error of a sound is one RequestError with the sound's name. soundfile is
imported with the first encoded sound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError
from shmllm.frontend.audio.decoding import open_bytes
from shmllm.frontend.audio.sound import Sound, check_length, whole_rate

MOST_CHANNELS = 32
"""The largest number of channels of an array."""
_FULL_SCALE = {"int16": (0, 2**15), "int32": (0, 2**31), "uint8": (2**7, 2**7)}
"""PCM samples by dtype: silence, and the distance from it to full scale."""
_FLOATS = ("float16", "float32", "float64", "bfloat16")


def open_audio(name: str, value: Any, default_rate: int) -> Sound:
    """Makes a mono sound of what a user gives.

    Args:
        name: the sound's name for messages, such as "prompt 3: audio 1".
        value: a Sound; encoded bytes; samples as a numpy array or torch tensor of shape [time],
            [channels, time] or [time, channels], where the shorter axis has the channels, or as a
            list of numbers; or a pair (samples, rate in Hz). Samples are floats, or PCM as int16,
            int32 or uint8, which becomes floats from -1 to 1.
        default_rate: the rate in Hz of samples without one.

    Returns:
        The sound in its own rate. Its samples may be those of `value`, not copied.

    Raises:
        RequestError: `value` is something else, empty, not finite, too long, or cannot be decoded.
    """
    if isinstance(value, Sound):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return open_bytes(name, bytes(value))
    samples, rate = value, default_rate
    if isinstance(value, tuple):
        if len(value) != 2:
            raise RequestError(f"{name} must be a pair (samples, rate), not {len(value)} values")
        samples, rate = value[0], whole_rate(name, value[1])
    if isinstance(samples, list):
        samples = _array_of(name, samples)
    if not (hasattr(samples, "shape") and hasattr(samples, "dtype")):
        raise RequestError(
            f"{name} must be samples as a numpy array, torch tensor or list of floats, a pair "
            f"(samples, rate), or encoded bytes, not {_kind_of(value)}"
        )
    return Sound(_mono(name, samples, rate), rate)


def _array_of(name: str, samples: list[Any]) -> NDArray[np.float64]:
    try:
        return np.array(samples, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{name} does not consist of samples: {error}") from None


def _kind_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a pair with {type(value[0]).__name__}"
    return type(value).__name__


def _mono(name: str, value: Any, rate: int) -> NDArray[np.float32]:
    """The samples of an array or tensor with its channels averaged, float32 [time]."""
    shape = _checked_shape(name, value)
    kind = str(value.dtype).removeprefix("torch.")
    if kind not in _FULL_SCALE and kind not in _FLOATS:
        raise RequestError(
            f"{name}: samples must be floats, or PCM as int16, int32 or uint8, not {value.dtype}; "
            "scale them to -1 to 1 as float32"
        )
    channels = None if len(shape) == 1 else int(shape[1] < shape[0])
    check_length(name, shape[0] if channels is None else shape[1 - channels], rate)
    samples = _floats(name, value, kind)
    if channels is not None:
        samples = samples.mean(axis=channels, dtype=np.float32)
    samples = np.ascontiguousarray(samples)
    if not np.isfinite(samples).all():
        raise RequestError(f"{name}: samples must be finite numbers")
    return samples


def _checked_shape(name: str, value: Any) -> tuple[int, ...]:
    try:
        shape = tuple(int(each) for each in value.shape)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}: the samples have no shape: {error}") from None
    if len(shape) not in (1, 2):
        raise RequestError(
            f"{name}: samples must have the shape [time], [channels, time] or [time, channels], "
            f"not {list(shape)}"
        )
    if 0 in shape:
        raise RequestError(f"{name} has no samples: its shape is {list(shape)}")
    if len(shape) == 2 and min(shape) > MOST_CHANNELS:
        raise RequestError(
            f"{name}: samples of shape {list(shape)} have {min(shape)} channels, more than "
            f"{MOST_CHANNELS}; average them"
        )
    return shape


def _floats(name: str, value: Any, kind: str) -> NDArray[np.float32]:
    """The samples as float32; PCM is scaled to -1 to 1. Values above float32 become infinite."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.float() if kind == "bfloat16" else value
        with np.errstate(over="ignore"):
            samples: NDArray[np.float32] = np.asarray(np.asarray(value), np.float32)
    except Exception as error:  # A tensor without memory, or an array of another library.
        reason = str(error) or type(error).__name__
        raise RequestError(f"{name}: the samples cannot be read: {reason}") from None
    if kind in _FULL_SCALE:
        silence, scale = _FULL_SCALE[kind]
        samples = (samples - np.float32(silence)) / np.float32(scale)
    return samples
