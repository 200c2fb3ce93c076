"""Solar Open: Llama's attention, and DeepSeek-V3's experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import read_sigmoid_experts
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131_072)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=8, head_dim=128, bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=1e6, partial=1.0)
    experts = read_sigmoid_experts(fields, inner=1280, num_experts=128)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=experts)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))
