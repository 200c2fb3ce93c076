"""Llama 1 to 3.x. The fields ``attention_bias`` and ``mlp_bias`` decide on all biases."""

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
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = with_rope(read_attention(fields, bias=bias, output_bias=bias), fields, positions)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    layer = LayerSpec(mixer=attention, mlp=mlp)
    return read_model(fields, [layer] * read_num_layers(fields), positions)
