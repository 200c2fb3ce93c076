"""Ling and Ling-Coder (Bailing MoE 1): Llama's attention under other names; experts chosen by a
softmax, beside others that all tokens go to. The defaults are those of the models' own
configuration class."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import bailing_moe_v2
from shmllm.models.families.deepseek_v3 import check_choice, read_routed_experts, with_dense_layers
from shmllm.models.fields import Fields
from shmllm.models.readers import read_attention, read_model, read_norm, read_positions, with_rope

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, Any] = {
    "score_function": "softmax",
    "norm_head": False,
    "norm_softmax": False,
    "multi_gate": False,
    "use_sliding_window": False,
    "use_qk_norm": False,
    "moe_router_enable_expert_bias": False,
    "partial_rotary_factor": 1.0,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
"""Fields of some models, and what they must say."""


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    if fields.flag("use_bias", True):
        raise fields.error("use_bias true is not supported; supported: false")
    positions = read_positions(fields, 16_384)
    attention = read_attention(fields, bias=fields.flag("use_qkv_bias", False))
    named = fields.under_names(
        {"n_routed_experts": ("num_experts", 16), "n_shared_experts": ("num_shared_experts", 0)}
    )
    experts = replace(
        read_routed_experts(
            named,
            inner=fields.integer("moe_intermediate_size"),
            num_experts=None,
            top_k=2,
            num_shared=0,
        ),
        renormalize=fields.flag("norm_topk_prob", True),
        router_float32=False,
    )
    if experts.shared is not None:
        check_choice(fields, "moe_shared_expert_intermediate_size", experts.inner)
    layers = with_dense_layers(fields, with_rope(attention, fields, positions), experts, default=0)
    model = read_model(fields, layers, positions)
    return replace(model, norm=read_norm(fields, default=1e-5))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return bailing_moe_v2.named_weights(weights, config)
