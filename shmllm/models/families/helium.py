"""Helium: Llama whose neighbouring elements of a head rotate together."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 4096)
    attention = read_attention(
        fields, num_kv_heads=20, head_dim=128, bias=fields.flag("attention_bias", False)
    )
    if attention.width != (hidden_size := fields.integer("hidden_size")):
        raise fields.error(
            f"the width of all heads ({attention.width}) must be hidden_size ({hidden_size})"
        )
    rope = RopeConfig.from_fields(
        fields, positions, attention.head_dim, theta=100_000.0, interleaved=True
    )
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=read_norm(fields, default=1e-8))
