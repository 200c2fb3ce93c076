"""Hunyuan 4 (HY V4): GLM-5's attention with sinks and gates, DeepSeek-V3's experts with bounds, and
several residual streams that layers read a sum of. Images of HY V4 VL are not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import read_latent_attention, read_sigmoid_experts
from shmllm.models.families.deepseek_v32 import with_indexer, with_mlps
from shmllm.models.families.glm_moe_dsa import with_shared_choices
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.models.readers import (
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.specs import MoESpec
from shmllm.models.stream_specs import ConnectionSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

MOST_STREAMS = 8
_ROPE, _OF_AXES = "rope_parameters", ("mrope_section", "mrope_interleaved")

_NAMES = {
    ".self_attn.g_proj.": ".self_attn.linear_gate.",
    ".self_attn.sinks": ".self_attn.learnable_sink_param",
    ".attn_hc.": ".hc_pre.hc_attn_layer.hc_",
    ".ffn_hc.": ".hc_pre.hc_mlp_layer.hc_",
    ".hc_head.hc_": ".hc_pre.hc_head.hc_head_",
}
"""The parts of names that differ from the default ones, in files."""
_IN_MODULES = {".self_attn.g_proj.": ".self_attn.gate_proj."}
"""Those in transformers' modules."""
_IN_OTHER_FILES = _NAMES | {
    ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
    ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
    ".hc_head.hc_": ".hc_head.hc_pre.hc_head_",
    ".mlp.gate_proj.": ".mlp.linear_gate.",
    ".mlp.shared_experts.gate_proj.": ".mlp.shared_experts.linear_gate.",
}
"""Those that transformers reads and writes in files, too."""


def configure(fields: Fields) -> ModelConfig:
    fields = _of_text(fields.null_as_false("norm_topk_prob"))
    positions, norm = read_positions(fields, 262_144), read_norm(fields, default=1e-5)
    # A kind of layers, by which transformers chooses masks and a cache.
    read_layer_types(fields, read_num_layers(fields), ("indexed_attention",))
    mixers = with_shared_choices(fields, _read_attention(fields, positions, norm.eps), every=4)
    layers = with_mlps(fields, mixers, _read_experts(fields), num_dense=1)
    connections = ConnectionSpec(
        num_streams=fields.integer("hc_mult", 4, maximum=MOST_STREAMS),
        magnitude=fields.number("hc_magnitude", 2.0),
        eps=fields.number("hc_eps", 1e-6),
        norm_eps=norm.eps,
    )
    model = read_model(fields, layers, positions)
    return replace(
        model,
        norm=norm,
        lm_head_float32=not model.tie_word_embeddings,
        connections=connections,
        skipped_prefixes=("model.mtp_layers.",),  # they predict further tokens
    )


def _of_text(fields: Fields) -> Fields:
    """Returns the fields of a model whose images are not computed: positions of text are the same
    on the three axes that its rotation has."""
    if fields.whole is fields:
        return fields
    fields = fields.with_defaults({"q_lora_rank": 2048, "index_n_heads": 32})
    rope = {name: value for name, value in fields.table(_ROPE).items() if name not in _OF_AXES}
    return fields.with_values(fields.values | ({_ROPE: rope} if rope else {}))


def _read_attention(fields: Fields, positions: int, norm_eps: float) -> LatentAttentionSpec:
    sees_images = fields.whole is not fields  # and neighbours rotate together then
    attention = read_latent_attention(
        fields, positions, interleaved=sees_images, nope_dim=192, value_dim=256
    )
    attention = with_indexer(fields, positions, attention, num_heads=16, interleaved=sees_images)
    if sees_images:
        attention = replace(attention, norm_eps=norm_eps)
    assert attention.indexer is not None, "it was added"
    last = attention.rope_dim if attention.indexer.head_dim > attention.rope_dim else 0
    indexer = replace(attention.indexer, rotates_last=last, norm_eps=norm_eps)
    gates = attention.value_dim
    return replace(attention, indexer=indexer, sinks=True, gated=True, gates_per_head=gates)


def _read_experts(fields: Fields) -> MoESpec:
    experts = read_sigmoid_experts(fields, inner=768, num_experts=256, weight_scale=2.827)
    bound = fields.number("swiglu_limit", 10.0)
    return replace(experts, activation="silu_clamped", bound=bound)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names that differ in transformers' modules, and in files that
    it writes."""
    modules = {renamed(name, _IN_MODULES): views for name, views in weights.items()}
    return modules | {renamed(name, _IN_OTHER_FILES): views for name, views in weights.items()}
