"""Granite with experts in place of each MLP: the softmax of the chosen logits weights them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.granite import with_factors
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_SHARED = "input_linear", ("gate_proj", "up_proj")
_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.router.layer.",
    ".mlp.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".mlp.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".mlp.shared_expert.": ".shared_mlp.",
    ".mlp.": ".shared_mlp.",
    ".shared_mlp.down_proj.": ".shared_mlp.output_linear.",
}
_MODULE_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.router.",
    ".mlp.": ".block_sparse_moe.",
}
"""The parts of names that differ from the default ones, in files and in transformers' modules."""


def configure(fields: Fields) -> ModelConfig:
    return configure_with(fields, read_granite_experts(fields))


def configure_with(fields: Fields, experts: MoESpec) -> ModelConfig:
    """Returns Granite with these experts in each layer."""
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=with_rope(attention, fields, positions), mlp=experts)
    layers = [layer] * read_num_layers(fields)
    return with_factors(fields, read_model(fields, layers, positions))


def read_granite_experts(fields: Fields) -> MoESpec:
    """Returns the experts."""
    inner = fields.integer("intermediate_size", 11008)
    experts = read_experts(fields, inner, num_experts=8, top_k=2)
    return replace(experts, scoring="softmax_of_top", whole=True)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused

    return _renamed(with_fused(weights, _SHARED), _NAMES)


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return _renamed(weights, _MODULE_NAMES)


def _renamed(weights: NamedWeights, names: dict[str, str]) -> NamedWeights:
    return {renamed(name, names): views for name, views in weights.items()}
