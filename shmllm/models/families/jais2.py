"""Jais 2: Llama with LayerNorms, biases, and an MLP of squared ReLUs without a gate."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
    with_rope,
)
from shmllm.models.specs import NormSpec


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 8192)
    bias = fields.flag("attention_bias", True)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    mlp = read_ungated_mlp(fields, activation="relu2", bias=fields.flag("mlp_bias", True))
    layer = LayerSpec(mixer=with_rope(attention, fields, positions), mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm)
