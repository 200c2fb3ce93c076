"""Ling 2.0 and Ring 2.0 (Bailing MoE 2): norms of queries and keys, a rotation of a part of each
head, and DeepSeek-V3's experts. The defaults are those of the models' own configuration class."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice, read_sigmoid_experts, with_dense_layers
from shmllm.models.fields import Fields
from shmllm.models.readers import MOST_LAYERS, read_attention, read_model, read_positions
from shmllm.models.rope_config import RopeConfig
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, str | bool] = {
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "using_split_qkv_in_self_attention": False,
}
"""What fields of published models say, most of which their code does not read."""
NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    positions = read_positions(fields, 32_768)
    attention = read_attention(
        fields,
        num_kv_heads=4,
        head_dim=128,
        bias=fields.flag("use_qkv_bias", False),
        output_bias=fields.flag("use_bias", False),
    )
    rope = RopeConfig.from_fields(
        fields, positions, attention.head_dim, theta=600_000.0, partial=1.0
    )
    attention = replace(attention, rope=rope)
    if fields.flag("use_qk_norm", True):
        attention = replace(attention, qk_norm="head")
    named = fields.under_names(
        {"n_routed_experts": ("num_experts", 256), "n_shared_experts": ("num_shared_experts", 1)}
    )
    experts = read_sigmoid_experts(
        named, inner=512, num_experts=256, num_groups=8, top_groups=4, weight_scale=1.0
    )
    if experts.shared is not None:
        check_choice(fields, "moe_shared_expert_intermediate_size", experts.shared.inner)
    layers = with_dense_layers(fields, attention, experts, default=1)
    model = read_model(fields, layers, positions)
    return replace(model, skipped_prefixes=further_layers(fields, len(layers)))


def further_layers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the prefixes of the layers that predict further tokens."""
    count = fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
    return tuple(f"model.layers.{num_layers + index}." for index in range(count))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import QKV, with_fused

    fused = with_fused(weights, QKV)
    return {renamed(name, NAMES): views for name, views in fused.items()}
