"""Nemotron 3 and 4, and Minitron: LayerNorms with weights of 1 + w, an MLP of squared ReLUs without
a gate; half of each head rotates."""

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
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import NormSpec


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 4096)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.5)
    mlp = read_ungated_mlp(fields, activation="relu2", bias=fields.flag("mlp_bias", False))
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    eps = fields.number("norm_eps", 1e-5)
    return replace(model, norm=NormSpec(kind="layer", eps=eps, offset=1.0, bias=True))
