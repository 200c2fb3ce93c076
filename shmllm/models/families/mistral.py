"""Mistral: Llama without biases; every layer, or each of a type, may have the same window."""

from __future__ import annotations

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
    with_rope,
    with_windows,
)


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131072)
    attention = with_rope(read_attention(fields, num_kv_heads=8), fields, positions)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields))
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    types = read_layer_types(fields, num_layers)
    windows = windows_by_type(fields, types, window) if types else (window,) * num_layers
    return read_model(fields, with_windows(layer, windows), positions)
