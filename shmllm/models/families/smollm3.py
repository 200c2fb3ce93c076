"""SmolLM3: Llama, in which some layers do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_layer_types,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 32768)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=4, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=2e6)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    rotates, windows = _rotates(fields), _windows(fields)
    layers = [
        LayerSpec(mixer=replace(attention, window=window, rope=rope if rotated else None), mlp=mlp)
        for window, rotated in zip(windows, rotates, strict=True)
    ]
    return read_model(fields, layers, positions, tied=True)


def _rotates(fields: Fields) -> list[bool]:
    """Returns whether each layer rotates. Against its name, 1 in ``no_rope_layers`` means yes."""
    num_layers = read_num_layers(fields)
    found: Any = fields.values.get("no_rope_layers")
    if found is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(found, list) or len(found) != num_layers or set(found) - {0, 1}:
        raise fields.error(f"'no_rope_layers' must list 0 or 1 for each of {num_layers} layers")
    return [value == 1 for value in found]


def _windows(fields: Fields) -> tuple[int | None, ...]:
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if not fields.flag("use_sliding_window", False) or types is None:
        return (None,) * num_layers
    return windows_by_type(fields, types, read_window(fields, None))
