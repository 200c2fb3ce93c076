"""GLM-4.5 to 4.7: plain attention, half of each head rotates; DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    read_sigmoid_experts,
    with_dense_layers,
    with_further_layers,
)
from shmllm.models.fields import Fields
from shmllm.models.readers import read_attention, read_model, read_norm, read_positions
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131_072)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=8, bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.5)
    attention = replace(attention, rope=rope)
    if fields.flag("use_qk_norm", False):
        attention = replace(attention, qk_norm="head")
    experts = read_sigmoid_experts(fields, inner=1408, num_experts=128)
    layers = with_dense_layers(fields, attention, experts, default=1)
    model = with_further_layers(read_model(fields, layers, positions), fields, experts)
    return replace(model, norm=read_norm(fields, default=1e-5))
