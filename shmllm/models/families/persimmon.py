"""Persimmon (Adept, 2023): squared ReLUs without a gate, LayerNorms, also of each query and key
head; half of each head rotates. Checkpoints have query, key and value of each head side by side in
one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.gpt_neox import QKV
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
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "_norm.": "_layernorm.",
    ".self_attn.o_proj.": ".self_attn.dense.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    plain = {"num_key_value_heads": None, "head_dim": None}  # Persimmon has no such fields
    fields = fields.with_values(fields.values | plain)
    positions = read_positions(fields, 16_384)
    attention = read_attention(fields, bias=True, output_bias=True)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.5)
    attention = replace(attention, rope=rope)
    if fields.flag("qk_layernorm", True):
        attention = replace(attention, qk_norm="head", norms_have_bias=True)
    mlp = read_ungated_mlp(fields, activation="relu2", bias=True)
    layer = LayerSpec(mixer=attention, mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, QKV, config.attentions[0].num_kv_heads)
    return {renamed(name, _NAMES): views for name, views in found.items()}
