"""A.X K2 (SK Telecom): DeepSeek-V3.2 with gates of low rank behind the norms of its layers, and
with gates of what attention returns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.bailing_moe_v2 import further_layers
from shmllm.models.families.deepseek_v3 import read_latent_attention, read_sigmoid_experts
from shmllm.models.families.deepseek_v32 import with_indexer, with_mlps
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import read_layer_types, read_model, read_num_layers, read_positions
from shmllm.models.specs import MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS = {"kv_lora_rank": 128, "qk_rope_head_dim": 32}
_FIRST, _SECOND = "input_layernorm.norm", "post_attention_layernorm.norm"
_DOWN, _UP = ".norm.gate.up_proj.", ".norm.gate.down_proj."
_IN_FILES = {_DOWN: ".W_down.", _UP: ".W_up."}
_IN_MODULES = {
    _DOWN: ".mlp.fc1.",
    _UP: ".mlp.fc2.",
    ".self_attn.q_b_proj.": ".self_attn.q_gate_proj.",
}


def configure(fields: Fields) -> ModelConfig:
    """Returns the configuration. The norm before a dense MLP has no gates."""
    fields = fields.null_as_false("norm_topk_prob").with_defaults(_DEFAULTS)
    if fields.values.get("q_lora_rank", 384) is None:
        raise fields.error("q_lora_rank null is not supported")
    positions, num_layers = read_positions(fields, 131_072), read_num_layers(fields)
    read_layer_types(fields, num_layers, ("indexed_attention",))
    attention = read_latent_attention(
        fields, positions, interleaved=True, query_rank=384, nope_dim=64, value_dim=64
    )
    attention = with_indexer(
        fields, positions, replace(attention, gates_of_elements=True), num_heads=16
    )
    experts = read_sigmoid_experts(
        fields.with_defaults({"n_group": 1, "topk_group": 1}),
        inner=512,
        num_experts=128,
        weight_scale=2.5,
    )
    rank = fields.integer("gated_norm_rank", 16)
    layers = with_mlps(fields, [attention] * num_layers, experts, num_dense=1)
    return replace(
        read_model(fields, [_with_gates(layer, rank) for layer in layers], positions),
        skipped_prefixes=further_layers(fields, num_layers),
    )


def _with_gates(layer: LayerSpec, rank: int) -> LayerSpec:
    """Returns a layer with gates of its norms."""
    if isinstance(layer.mlp, MLPSpec):
        norms = LayerNorms(
            before_mixer=_FIRST,
            before_mlp="post_attention_layernorm",
            gated=(_FIRST,),
            gate_rank=rank,
        )
    else:
        norms = LayerNorms(
            before_mixer=_FIRST, before_mlp=_SECOND, gated=(_FIRST, _SECOND), gate_rank=rank
        )
    return replace(layer, norms=norms)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _IN_FILES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of what transformers' modules call otherwise."""
    names = {name: renamed(name, _IN_MODULES) for name in weights}
    return {other: weights[name] for name, other in names.items() if other != name}
