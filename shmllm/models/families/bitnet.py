"""BitNet b1.58 2B4T (Ma et al., 2025): Llama with gated squared ReLUs, and norms of what the last
projections of attention and MLP read. `checkpoint_formats.bitnet` has its ternary weights."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec


def configure(fields: Fields) -> ModelConfig:
    positions, norm = read_positions(fields, 2048), read_norm(fields, default=1e-5)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=5, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=500_000.0)
    mlp = MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(fields, default="relu2"),
        norm=norm,
    )
    layer = LayerSpec(mixer=replace(attention, rope=rope, output_norm=True), mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=norm)
