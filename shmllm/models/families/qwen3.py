"""Qwen 3: no biases by default; query and key heads are normalised before the rotation."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.qwen2 import qwen_windows
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_positions,
    with_rope,
    with_windows,
)


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 32768)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=32, head_dim=128, bias=bias, output_bias=bias)
    attention = replace(with_rope(attention, fields, positions), qk_norm="head")
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields))
    return read_model(fields, with_windows(layer, qwen_windows(fields)), positions)
