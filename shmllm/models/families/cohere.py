"""Cohere (Command R): attention and MLP side by side behind one LayerNorm; neighbouring elements
rotate together."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.cohere2 import NORMS, cohere_model
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_attention, read_mlp, read_num_layers, read_positions
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 8192)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(
        fields, positions, attention.head_dim, theta=500_000.0, interleaved=True
    )
    attention = replace(attention, rope=rope)
    if fields.flag("use_qk_norm", False):
        attention = replace(attention, qk_norm="each")
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields), norms=NORMS, parallel=True)
    return cohere_model(fields, [layer] * read_num_layers(fields), positions)
