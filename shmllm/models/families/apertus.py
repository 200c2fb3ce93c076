"""Apertus (Swiss AI, 2025): Llama with norms of heads, and an MLP without a gate whose activation,
xIELU, has numbers that each layer learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec

_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The rotation of a file that has no parameters of it."""


def configure(fields: Fields) -> ModelConfig:
    if not fields.table("rope_parameters") and not fields.table("rope_scaling"):
        fields = fields.with_values(fields.values | {"rope_parameters": _ROPE})
    positions = read_positions(fields, 65_536)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=_ROPE["rope_theta"])
    norms = LayerNorms(before_mixer="attention_layernorm", before_mlp="feedforward_layernorm")
    layer = LayerSpec(
        mixer=replace(attention, rope=rope, qk_norm="head"), mlp=_read_mlp(fields), norms=norms
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))


def _read_mlp(fields: Fields) -> MLPSpec:
    if fields.text("hidden_act", "xielu") != "xielu":
        return read_ungated_mlp(fields, activation="xielu", bias=False)
    return MLPSpec(inner=fields.integer("intermediate_size"), activation="xielu", gated=False)
