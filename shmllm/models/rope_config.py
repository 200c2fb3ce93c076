"""Reads and checks the rotary position embedding of a model's config.json.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from shmllm.models.fields import Fields

NUM_AXES = 3
"""The number of axes of most positions that have several: time, row and column."""

_SECTIONS = "mrope_section"


@dataclass(frozen=True, slots=True)
class VideoTimes:
    """Where the frames of a video are on the axis of time.

    Attributes:
        per_second: how many positions are a second; 0: a frame is one, whatever its time.
        is_aligned: whether they are those of TMRoPE (Xu et al., "Qwen2.5-Omni", 2025, section 2.2):
            what follows a video begins behind its last time, too.
    """

    per_second: float = 0.0
    is_aligned: bool = False


UNTIMED = VideoTimes()

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]

_TYPES: dict[str, RopeType] = {
    "default": "default",
    "mrope": "default",
    "dynamic": "default",  # it differs beyond max_position_embeddings, where no request runs
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "proportional": "proportional",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The parameters of rotary position embedding. Names are those of transformers.

    Attributes:
        rotary_dim: the number of elements at the beginning of each head that are rotated; even.
        interleaved: whether neighbouring elements are rotated together, and not those of the two
            halves.
        type: the method that extends the context length, or "proportional": of all pairs of a head
            only the first are rotated.
        theta: the base of the wavelengths.
        factor: the ratio of the extended to the original context length; used by all types but
            the default one.
        original_max_positions: the original context length; used by llama3, yarn and longrope.
        low_freq_factor: used by llama3.
        high_freq_factor: used by llama3.
        beta_fast: used by yarn.
        beta_slow: used by yarn.
        attention_factor: used by yarn and longrope to scale cos and sin. None: derived from
            ``factor``, and for yarn from ``mscale`` and ``mscale_all_dim``.
        mscale: used by yarn.
        mscale_all_dim: used by yarn.
        truncate: whether yarn rounds the correction range to whole dimensions.
        short_factors: used by longrope: divide the frequencies while `max_length` is not above the
            original context length, one number for each rotated pair.
        long_factors: used by longrope: these divide the frequencies otherwise.
        max_length: used by longrope: the largest number of tokens of a request.
        num_pairs: used by proportional: the number of pairs that are rotated; the frequencies of
            the others are 0.
        sections: how many pairs are rotated by each axis of a token's position, such as time, row
            and column (Wang et al., "Qwen2-VL", 2024, section 2.1); (): a position is one number.
        mixes_axes: whether pairs of the three axes take turns, and do not follow each other axis by
            axis; see `rope.axes`.
        time_last: whether pairs of rows and columns take turns before those of time, and sections
            are those of rows, columns and time (ERNIE 4.5 VL).
        reversed: whether heads turn the other way.
        magnitude: a further factor of cos and sin.
    """

    rotary_dim: int
    interleaved: bool = False
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    max_length: int = 0
    num_pairs: int = 0
    sections: tuple[int, ...] = ()
    mixes_axes: bool = False
    time_last: bool = False
    reversed: bool = False
    magnitude: float = 1.0

    @classmethod
    def from_fields(
        cls,
        fields: Fields,
        max_positions: int,
        head_dim: int,
        *,
        layer_type: str | None = None,
        theta: float = 10000.0,
        partial: float | None = None,
        interleaved: bool = False,
    ) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

        Args:
            fields: the fields of config.json.
            max_positions: the default of ``original_max_position_embeddings``.
            head_dim: the width of a head.
            layer_type: the name of the parameters to read if they differ by type of layer.
            theta: the default of ``rope_theta``.
            partial: the default of ``partial_rotary_factor``; None: the family rotates whole heads.
            interleaved: see the attribute; no field decides on it.

        Raises:
            EngineStartError: a field is malformed, or the rope type is not supported.
        """
        rope = _rope_fields(fields, layer_type)
        rope_type = _rope_type(rope)
        if rope_type != "default" and rope.values.get(_SECTIONS) is not None:
            raise rope.error(f"{_SECTIONS!r} beside rope type {rope_type!r} is not supported")
        if rope_type == "proportional":
            return _proportional(cls, rope, head_dim, theta)
        plain = cls(
            rotary_dim=_rotary_dim(fields, rope, head_dim, partial),
            interleaved=interleaved,
            type=rope_type,
            theta=rope.number("rope_theta", fields.number("rope_theta", theta)),
        )
        if rope_type == "default":
            return _with_sections(rope, plain)
        if rope_type == "linear":
            return replace(plain, factor=rope.number("factor"))
        original = fields.optional_integer("original_max_position_embeddings")
        if original is None:
            original = rope.integer("original_max_position_embeddings", max_positions)
        plain = replace(plain, original_max_positions=original)
        if rope_type == "llama3":
            return _llama3(rope, plain)
        if rope_type == "longrope":
            return _longrope(rope, plain, max_positions)
        return _yarn(rope, plain, max_positions)


def _rope_fields(fields: Fields, layer_type: str | None) -> Fields:
    parameters, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    if any(isinstance(value, dict) for value in parameters.values()):
        if layer_type is None:
            raise fields.error("'rope_parameters' that differ by layer type are not supported")
        rope = Fields(parameters, f"{fields.where}: rope_parameters")
        return Fields(rope.table(layer_type) | scaling, f"{rope.where}: {layer_type}")
    name = "rope_scaling" if scaling else "rope_parameters"
    return Fields(scaling or parameters, f"{fields.where}: {name}")


def _rope_type(rope: Fields) -> RopeType:
    name = rope.text("rope_type", rope.text("type", "default"))
    if name not in _TYPES:
        known = ", ".join(dict.fromkeys(_TYPES.values()))
        raise rope.error(f"rope type {name!r} is not supported; supported: {known}")
    if name == "dynamic":
        rope.number("factor")
    return _TYPES[name]


def _rotary_dim(fields: Fields, rope: Fields, head_dim: int, default: float | None) -> int:
    name = "partial_rotary_factor"
    partial = rope.number(name, fields.number(name, default or 1.0))
    if default is None and partial != 1:
        raise fields.error(f"{name} {partial:g} is not supported; supported: 1.0")
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            f"{name} {partial:g} of a head_dim of {head_dim} is not an even number of elements"
        )
    return rotary_dim


def count_axes(ropes: Iterable[RopeConfig]) -> int:
    """Returns the number of axes of positions; 0: a position is one number."""
    return max((len(rope.sections) for rope in ropes), default=0)


def _with_sections(rope: Fields, plain: RopeConfig) -> RopeConfig:
    sections: Any = rope.values.get(_SECTIONS)
    if sections is None:
        if rope.text("rope_type", rope.text("type", "default")) == "mrope":
            raise rope.error(f"rope type 'mrope' needs {_SECTIONS!r}")
        return plain
    is_list = isinstance(sections, list) and len(sections) == NUM_AXES
    if not is_list or any(type(each) is not int or each < 1 for each in sections):
        raise rope.error(f"{_SECTIONS!r} must list {NUM_AXES} positive integers")
    found, wanted = sum(sections), plain.rotary_dim // 2
    if found != wanted:
        raise rope.error(
            f"{_SECTIONS!r} must add up to the {wanted} rotated pairs of a head, not {found}"
        )
    mixes_axes = rope.flag("mrope_interleaved", False)
    return replace(plain, sections=tuple(sections), mixes_axes=mixes_axes)


def _proportional(make: type[RopeConfig], rope: Fields, head_dim: int, theta: float) -> RopeConfig:
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise rope.error(f"partial_rotary_factor must be at most 1, not {share:g}")
    return make(
        rotary_dim=head_dim,
        type="proportional",
        theta=rope.number("rope_theta", theta),
        factor=rope.number("factor", 1.0),
        num_pairs=int(share * head_dim // 2),
    )


def _llama3(rope: Fields, plain: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low > high:
        raise rope.error(f"high_freq_factor ({high}) must be at least low_freq_factor ({low})")
    return replace(plain, factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, plain: RopeConfig, max_positions: int) -> RopeConfig:
    if plain.theta == 1:
        raise rope.error("rope_theta must not be 1 with rope type 'yarn'")
    return replace(
        plain,
        factor=rope.number("factor", max_positions / plain.original_max_positions),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.null_as_false("truncate").flag("truncate", True),
    )


def _longrope(rope: Fields, plain: RopeConfig, max_positions: int) -> RopeConfig:
    return replace(
        plain,
        factor=rope.number("factor", max_positions / plain.original_max_positions),
        attention_factor=rope.optional_number("attention_factor"),
        short_factors=_pair_factors(rope, "short_factor", plain.rotary_dim // 2),
        long_factors=_pair_factors(rope, "long_factor", plain.rotary_dim // 2),
        max_length=max_positions,
    )


def _pair_factors(rope: Fields, name: str, num_pairs: int) -> tuple[float, ...]:
    values: Any = rope.values.get(name)
    if not isinstance(values, list) or len(values) != num_pairs:
        raise rope.error(f"{name!r} must list a number for each of {num_pairs} rotated pairs")
    return tuple(Fields({name: value}, rope.where).number(name) for value in values)
