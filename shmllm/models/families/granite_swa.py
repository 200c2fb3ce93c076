"""Granite with sinks, and with a window in three of four layers; each layer has a base of its
rotation, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.granite import configure as configure_granite
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_layer_types,
    read_window,
    windows_by_type,
)

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    return with_sinks(fields, configure_granite(fields))


def with_sinks(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Returns a Granite with sinks, and with the window and the rotation of each layer."""
    types = read_layer_types(fields, model.num_layers)
    if types is None:
        types = tuple(SLIDING if index % 4 else FULL for index in range(model.num_layers))
    windows = windows_by_type(fields, types, read_window(fields, 128))
    layers = []
    for layer, window, theta in zip(
        model.layers, windows, _read_thetas(fields, model.num_layers), strict=True
    ):
        attention = layer.mixer
        assert isinstance(attention, AttentionSpec), "Granite has attention alone"
        rope = attention.rope
        if rope is not None and theta is not None:
            rope = replace(rope, theta=theta) if theta else None
        layers.append(
            replace(layer, mixer=replace(attention, window=window, rope=rope, sinks=True))
        )
    return replace(model, layers=tuple(layers))


def _read_thetas(fields: Fields, num_layers: int) -> list[float | None]:
    """Returns ``layer_rope_theta``, where 0 means no rotation; None for each layer where the field
    is absent: all have the base of ``rope_parameters``."""
    name = "layer_rope_theta"
    values: Any = fields.values.get(name)
    if values is None:
        return [None] * num_layers
    if not isinstance(values, list) or len(values) != num_layers:
        raise fields.error(f"{name!r} must list a number for each of {num_layers} layers")
    own = (Fields({name: value}, fields.where) for value in values)
    return [
        0.0 if value == 0 else each.number(name) for value, each in zip(values, own, strict=True)
    ]
