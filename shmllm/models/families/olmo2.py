"""OLMo 2: norms behind attention and MLP instead of before them, and over all heads of queries and
of keys."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    with_rope,
)

NORMS = LayerNorms(after_mixer="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    attention = with_rope(read_olmo_attention(fields), fields, positions)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields), norms=NORMS)
    return olmo_model(fields, [layer] * read_num_layers(fields), positions)


def read_olmo_attention(fields: Fields) -> AttentionSpec:
    """Returns an attention over all positions, without rotation."""
    bias = fields.flag("attention_bias", False)
    return replace(read_attention(fields, bias=bias, output_bias=bias), qk_norm="row")


def olmo_model(fields: Fields, layers: list[LayerSpec], positions: int) -> ModelConfig:
    """Returns the configuration with what OLMo's models have in common."""
    return replace(read_model(fields, layers, positions), norm=read_norm(fields, default=1e-5))
