"""Seed-OSS: Llama whose queries, keys and values have biases of their own flag."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent({"head_dim": 128})
    positions = read_positions(fields, 524_288)
    attention = read_attention(
        fields,
        num_kv_heads=8,
        bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
    )
    attention = with_rope(attention, fields, positions)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    layer = LayerSpec(mixer=attention, mlp=mlp)
    return read_model(fields, [layer] * read_num_layers(fields), positions)
