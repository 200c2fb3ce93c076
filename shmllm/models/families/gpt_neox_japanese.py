"""GPT-NeoX Japanese: GPT-NeoX with attention before the MLP, and one bias, of the last attention's
output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families import gpt_neox
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ROPE = {
    "rope_theta": ("rotary_emb_base", 10_000.0),
    "partial_rotary_factor": ("rotary_pct", 1.0),
}
"""Its names of the fields of the rotation, with their defaults."""
_BIAS, _OWN_BIAS = ".attention.dense.bias", ".attention.dense_bias"


def configure(fields: Fields) -> ModelConfig:
    plain = {"num_key_value_heads": None, "head_dim": None}  # it has no such fields
    fields = fields.under_names(_ROPE)
    fields = fields.with_values(fields.values | plain)
    positions, num_layers = read_positions(fields, 2048), read_num_layers(fields)
    attention = read_attention(fields)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=1.0)
    mlp = MLPSpec(
        inner=fields.integer("hidden_size") * fields.integer("intermediate_multiple_size", 4),
        activation=read_activation(fields, default="gelu"),
        gated=False,
    )
    mixers = [replace(attention, rope=rope)] * num_layers
    mixers[-1] = replace(mixers[-1], output_bias=True)
    layers = [LayerSpec(mixer=mixer, mlp=mlp) for mixer in mixers]
    model = read_model(fields, layers, positions, tied=True)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    found = gpt_neox.named_weights(weights, config)
    return {name.replace(_BIAS, _OWN_BIAS): views for name, views in found.items()}
