"""The frequencies of rotary embedding, for each method of extending the context length.

Each step computes the cosines and sines of its own positions. A table of them for 131,072
positions and a head_dim of 128 would take 128 MiB.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shmllm.models.rope_config import NUM_AXES, RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Returns the angle per position of each rotated pair: [rotary_dim / 2] float32 on the CPU."""
    return -_frequencies(rope) if rope.reversed else _frequencies(rope)


def _frequencies(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    wavelengths = rope.theta**exponents
    if rope.type == "linear":
        return 1.0 / wavelengths / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    if rope.type == "yarn":
        return _yarn(rope, wavelengths)
    if rope.type == "longrope":
        return _longrope(rope, wavelengths)
    if rope.type == "proportional":
        is_rotated = torch.arange(len(wavelengths)) < rope.num_pairs
        return torch.where(is_rotated, 1.0 / wavelengths, 0.0) / rope.factor
    return 1.0 / wavelengths


def axes(rope: RopeConfig) -> tuple[int, ...]:
    """Returns the axis of the position by which each rotated pair is turned, such as 0 for time, 1
    for the row and 2 for the column; all 0 if a position is one number.

    Pairs of the axes follow each other (Wang et al., "Qwen2-VL", 2024), or take turns while
    an axis has some left, and the rest belong to time (Qwen 3 VL). Or those of rows and columns
    take turns, and those of time follow (ERNIE 4.5 VL).
    """
    num_pairs = rope.rotary_dim // 2
    if not rope.sections:
        return (0,) * num_pairs
    if rope.time_last:
        rows, columns, time = rope.sections
        assert rows == columns, "they take turns"
        return (1, 2) * rows + (0,) * time
    if not rope.mixes_axes:
        return tuple(axis for axis, count in enumerate(rope.sections) for _ in range(count))
    turns = (pair % NUM_AXES for pair in range(num_pairs))
    return tuple(
        axis if pair < NUM_AXES * rope.sections[axis] else 0 for pair, axis in enumerate(turns)
    )


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor of cos and sin: ``rope.magnitude``, and besides that of yarn (Peng et al.,
    2023, eq. 15) and longrope (Ding et al., 2024)."""
    return rope.magnitude * _factor_of_type(rope)


def _factor_of_type(rope: RopeConfig) -> float:
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _longrope(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """Divides the frequency of each pair by a factor of its own.

    The factors are the same for all requests of an engine: keys that were cached while a request
    was short would have other angles than those that follow.
    """
    is_long = rope.max_length > rope.original_max_positions
    factors = rope.long_factors if is_long else rope.short_factors
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Divides the frequencies of long wavelengths by the factor, keeps those of short ones, and
    interpolates between them (Llama 3.1)."""
    rotations = rope.original_max_positions / (2 * math.pi / inv_freq)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((rotations - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """Interpolates linearly over the dimensions, from the original frequencies to those divided by
    the factor ("NTK by parts", Peng et al., 2023)."""
    low = _rotation_dim(rope, rope.beta_fast)
    high = _rotation_dim(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return stretched / (rope.factor * wavelengths) + (1 - stretched) / wavelengths


def _rotation_dim(rope: RopeConfig, rotations: float) -> float:
    """Returns the dimension that rotates ``rotations`` times within the original context."""
    ratio = rope.original_max_positions / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))
