"""Sarvam 30B: norms of queries and keys, DeepSeek-V3's experts, and Ling 2.0's names of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.bailing_moe_v2 import NAMES, further_layers
from shmllm.models.families.bailing_moe_v2 import named_weights as bailing_weights
from shmllm.models.families.deepseek_v3 import check_choice, read_sigmoid_experts, with_dense_layers
from shmllm.models.fields import Fields
from shmllm.models.readers import read_attention, read_model, read_positions
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, str | bool] = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_bias": False,
}
"""What fields of published models say that transformers does not read."""
_OTHERS = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "attention_bias": ("use_qkv_bias",),
}
"""The names that fields have in published files, by those of DeepSeek."""


def configure(fields: Fields) -> ModelConfig:
    fields = under_deepseeks_names(fields)
    positions = read_positions(fields, 131_072)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=4, head_dim=64, bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=8e6, partial=1.0)
    attention = replace(attention, rope=rope)
    if fields.flag("use_qk_norm", True):
        attention = replace(attention, qk_norm="head")
    experts = read_sarvam_experts(fields, inner=1024, top_k=6)
    layers = with_dense_layers(fields, attention, experts, default=1)
    model = read_model(fields, layers, positions)
    return replace(model, skipped_prefixes=further_layers(fields, len(layers)))


def under_deepseeks_names(fields: Fields) -> Fields:
    """Returns the fields of Sarvam's own files under the names of DeepSeek's.

    Raises:
        EngineStartError: a field that transformers does not read asks for something else.
    """
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    found: dict[str, Any] = {}
    for name, others in _OTHERS.items():
        given = (fields.values[other] for other in others if fields.values.get(other) is not None)
        found[name] = next(given, None)
    return fields.with_defaults({name: value for name, value in found.items() if value is not None})


def read_sarvam_experts(fields: Fields, *, inner: int, top_k: int) -> MoESpec:
    """Returns the experts, and the MLP that all tokens go to.

    Args:
        fields: the result of `under_deepseeks_names`.
        inner: the default of ``moe_intermediate_size``.
        top_k: the default of ``num_experts_per_tok``.
    """
    experts = read_sigmoid_experts(
        fields, inner=inner, num_experts=128, top_k=top_k, weight_scale=2.5
    )
    if experts.shared is not None:
        check_choice(fields, "moe_shared_expert_intermediate_size", experts.shared.inner)
    return experts


named_weights = bailing_weights


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations that transformers' modules name otherwise."""
    fused = (".q_proj.", ".k_proj.", ".v_proj.")
    return {
        name: views
        for name, views in weights.items()
        if renamed(name, NAMES) != name or any(part in name for part in fused)
    }
