"""Hunyuan 3 (Hy3): Qwen 3's attention; experts in all layers but the first, chosen by sigmoids,
beside an MLP that all tokens go to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    DENSE,
    SPARSE,
    read_attention,
    read_experts,
    read_mlp,
    read_mlp_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.gate.": ".mlp.router.gate.",
}
_MODULE_NAMES = {".mlp.gate.e_score": ".mlp.e_score"}
"""The parts of names that differ from the default ones, in files and in transformers' modules."""


def configure(fields: Fields) -> ModelConfig:
    positions, num_layers = read_positions(fields, 131_072), read_num_layers(fields)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=8, head_dim=128, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=11_158_840.0)
    attention = replace(attention, rope=rope, qk_norm="head")
    types = read_mlp_types(fields, num_layers) or (DENSE,) + (SPARSE,) * (num_layers - 1)
    kinds: dict[str, MLPSpec | MoESpec] = {
        DENSE: read_mlp(fields, bias=fields.flag("mlp_bias", False)),
        SPARSE: _read_experts(fields),
    }
    layers = [LayerSpec(mixer=attention, mlp=kinds[kind]) for kind in types]
    return replace(
        read_model(fields, layers, positions),
        norm=read_norm(fields, default=1e-5),
        skipped_prefixes=(f"model.layers.{num_layers}.",),  # it predicts a further token
    )


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("moe_intermediate_size", 1536)
    num_shared = fields.integer("num_shared_experts", 1)
    bias = fields.flag("mlp_bias", False)
    return replace(
        read_experts(fields, inner, num_experts=192, top_k=8),
        scoring="sigmoid",
        renormalize=True,
        correction_bias=True,
        router_float32=True,
        weight_scale=fields.number("router_scaling_factor", 2.826),
        shared=MLPSpec(inner=inner * num_shared, bias=bias),
        shared_name="shared_mlp",
        shared_module="shared_experts",
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _MODULE_NAMES): views for name, views in weights.items()}
