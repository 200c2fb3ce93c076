"""Qwen 2 and 2.5: biases on q, k and v, and none on o; sliding windows on the upper layers."""

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


def configure(fields: Fields, num_kv_heads: int = 32) -> ModelConfig:
    """
    Args:
        fields: the fields of config.json.
        num_kv_heads: the default of ``num_key_value_heads``.
    """
    positions = read_positions(fields, 32768)
    attention = read_attention(fields, num_kv_heads=num_kv_heads, bias=True)
    attention = with_rope(attention, fields, positions)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields))
    return read_model(fields, with_windows(layer, qwen_windows(fields)), positions)


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Returns the window of each layer: by ``layer_types``, or from ``max_window_layers`` on, if
    ``use_sliding_window`` is true."""
    num_layers = read_num_layers(fields)
    enabled = fields.flag("use_sliding_window", False)
    window = read_window(fields, 4096) if enabled else None
    types = read_layer_types(fields, num_layers)
    if types is not None:
        return windows_by_type(fields, types, window)
    first = fields.integer("max_window_layers", 28, minimum=0) if window else num_layers
    return tuple(window if layer >= first else None for layer in range(num_layers))
