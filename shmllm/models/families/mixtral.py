"""Mixtral: Mistral with experts in place of each MLP, whose weights are divided by their sum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_window,
    with_windows,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131072)
    attention = read_attention(fields, num_kv_heads=8)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=1e6)
    experts = read_experts(fields, fields.integer("intermediate_size"), num_experts=8, top_k=2)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=replace(experts, renormalize=True))
    windows = [read_window(fields, None)] * read_num_layers(fields)
    model = read_model(fields, with_windows(layer, windows), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
