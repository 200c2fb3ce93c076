"""Mistral: Llama without biases; every layer may have the same sliding window."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    with_rope,
    with_windows,
)
from shmllm.models.specs import LayerSpec


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131072)
    attention = with_rope(read_attention(fields, num_kv_heads=8), fields, positions)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields))
    windows = [read_window(fields, 4096)] * read_num_layers(fields)
    return read_model(fields, with_windows(layer, windows), positions)
