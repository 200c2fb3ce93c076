"""EXAONE 4: norms behind attention and MLP, and of each head of queries and keys. In models that
have windows, only the layers with one rotate."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.olmo2 import NORMS, olmo_model
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
)
from shmllm.models.specs import LayerSpec


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    attention = read_attention(fields, num_kv_heads=32)
    attention = with_rope(replace(attention, qk_norm="head"), fields, positions)
    window, num_layers = read_window(fields, 4096), read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        pattern = 1 if window is None else fields.integer("sliding_window_pattern", 4)
        types = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    mixers = [
        replace(attention, window=own, rope=None if window and own is None else attention.rope)
        for own in windows_by_type(fields, types, window)
    ]
    mlp = read_mlp(fields)
    layers = [LayerSpec(mixer=mixer, mlp=mlp, norms=NORMS) for mixer in mixers]
    return olmo_model(fields, layers, positions)
