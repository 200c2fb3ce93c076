"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side behind one LayerNorm, half of each head
rotates, and the LM head has a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "_norm.": "_layernorm.",
    ".self_attn.o_proj.": ".self_attn.dense.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
}


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    attention = read_attention(fields, bias=True, output_bias=True)
    if fields.flag("qk_layernorm", False):
        attention = replace(attention, qk_norm="head", norms_have_bias=True)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.5)
    mlp = read_ungated_mlp(fields, activation="gelu_new", bias=True)
    layer = LayerSpec(
        mixer=replace(attention, rope=rope),
        mlp=mlp,
        norms=LayerNorms(before_mixer="input_layernorm"),
        parallel=True,
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm, lm_head_bias=True)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
