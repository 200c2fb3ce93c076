"""The language model of North Micro Vision (Cohere Compass): Cohere 2 whose types of layers have
rotations of their own, or none. Its tower for images is not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.cohere2 import NORMS, cohere_model
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    FULL,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Parameters of rotations that are the same for text, whatever they say."""


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_values(fields.values | {"head_dim": None})  # it has no such field
    positions, num_layers = read_positions(fields, 8192), read_num_layers(fields)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    types = read_layer_types(fields, num_layers) or (FULL,) * num_layers
    windows = windows_by_type(fields, types, read_window(fields, 4096))
    ropes = {kind: _read_rope(fields, positions, attention.head_dim, kind) for kind in set(types)}
    layers = [
        LayerSpec(
            mixer=replace(attention, window=window, rope=ropes[kind]),
            mlp=read_mlp(fields),
            norms=NORMS,
            parallel=True,
        )
        for kind, window in zip(types, windows, strict=True)
    ]
    return cohere_model(fields, layers, positions, logits_scale=1.0)


def _read_rope(fields: Fields, positions: int, head_dim: int, kind: str) -> RopeConfig | None:
    """Returns the rotation of a type of layers; null: they have none."""
    parameters: dict[str, Any] = fields.table("rope_parameters")
    if any(isinstance(each, dict) for each in parameters.values()) or kind in parameters:
        if parameters.get(kind, {}) is None:
            return None
        parameters = Fields(parameters, f"{fields.where}: rope_parameters").table(kind)
        if not parameters:
            raise fields.error(f"'rope_parameters' must have an object {kind!r}")
    of_text = {name: each for name, each in parameters.items() if name not in _OF_IMAGES}
    own = Fields({"rope_parameters": of_text}, fields.where)
    return RopeConfig.from_fields(own, positions, head_dim)
