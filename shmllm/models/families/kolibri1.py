"""Kolibri 1 (Aleph Alpha): EXAONE 4's attention with norms on both sides, and experts in all
layers, which are chosen by logits and weighted by their sigmoids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.exaone4 import read_mixers
from shmllm.models.families.glm4 import NORMS
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_experts, read_model, read_positions
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_POSITIONS = 262_144
_DEFAULTS = {
    "max_position_embeddings": _POSITIONS,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 513,
}
_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias",
    ".post_self_attn_layernorm.": ".post_attn_norm.",
    ".post_mlp_layernorm.": ".post_ffn_norm.",
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    fields = fields.with_values(fields.values | {"sliding_window_pattern": 5})
    experts = _read_experts(fields)
    layers = [LayerSpec(mixer=each, mlp=experts, norms=NORMS) for each in read_mixers(fields)]
    return read_model(fields, layers, read_positions(fields, _POSITIONS))


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("moe_intermediate_size", 512)
    return replace(
        read_experts(fields, inner, num_experts=384, top_k=6),
        scoring="sigmoid_of_top",
        renormalize=fields.flag("norm_topk_prob", False),
        total_eps=0.0,
        correction_bias=True,
        router_float32=True,
        shared=MLPSpec(inner=fields.integer("shared_expert_intermediate_size", 512)),
        shared_name="shared_experts",
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations that transformers' modules name otherwise."""
    return {name: views for name, views in weights.items() if renamed(name, _NAMES) != name}
