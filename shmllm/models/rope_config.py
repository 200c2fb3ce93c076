"""Reads and checks the rotary position embedding of a model's config.json.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shmllm.models.fields import Fields

RopeType = Literal["default", "linear", "llama3", "yarn"]

_TYPES: dict[str, RopeType] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The parameters of rotary position embedding. Names are those of transformers.

    Attributes:
        type: the method that extends the context length.
        theta: the base of the wavelengths.
        factor: the ratio of the extended to the original context length; used by linear, llama3
            and yarn.
        original_max_positions: the original context length; used by llama3 and yarn.
        low_freq_factor: used by llama3.
        high_freq_factor: used by llama3.
        beta_fast: used by yarn.
        beta_slow: used by yarn.
        attention_factor: used by yarn to scale cos and sin. None: derived from ``factor``,
            ``mscale`` and ``mscale_all_dim``.
        mscale: used by yarn.
        mscale_all_dim: used by yarn.
        truncate: whether yarn rounds the correction range to whole dimensions.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_fields(cls, fields: Fields, max_positions: int) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

        Args:
            fields: the fields of config.json.
            max_positions: the default of ``original_max_position_embeddings``.

        Raises:
            EngineStartError: a field is malformed, or the rope type is not supported.
        """
        rope = _rope_fields(fields)
        rope_type = _rope_type(rope)
        theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "linear":
            return cls(type="linear", theta=theta, factor=rope.number("factor"))
        original = fields.optional_integer("original_max_position_embeddings")
        if original is None:
            original = rope.integer("original_max_position_embeddings", max_positions)
        if rope_type == "llama3":
            return _llama3(rope, theta, original)
        return _yarn(rope, theta, original, max_positions)


def _rope_fields(fields: Fields) -> Fields:
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    values = fields.table(name)
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.error(f"{name!r} that differ by layer type are not supported")
    partial: Any = values.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise fields.error(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    return Fields(values, f"{fields.where}: {name}")


def _rope_type(rope: Fields) -> RopeType:
    name = rope.text("rope_type", rope.text("type", "default"))
    if name not in _TYPES:
        raise rope.error(f"rope type {name!r} is not supported; supported: {', '.join(_TYPES)}")
    return _TYPES[name]


def _llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"high_freq_factor ({high}) must exceed low_freq_factor ({low})")
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=rope.number("factor", max_positions / original),
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
