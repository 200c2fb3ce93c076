"""LFM2 with experts behind the first layers: they are chosen by sigmoids with a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.lfm2 import NAMES, read_hybrid, with_old_names
from shmllm.models.fields import Fields
from shmllm.models.readers import read_experts, read_num_layers
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias"} | NAMES


def configure(fields: Fields) -> ModelConfig:
    fields = with_old_names(fields)
    num_layers = read_num_layers(fields)
    num_dense = min(fields.integer("num_dense_layers", 2, minimum=0), num_layers)
    mlps: list[FeedForwardSpec] = []
    if num_dense:
        mlps = [MLPSpec(inner=fields.integer("intermediate_size", 7168))] * num_dense
    return read_hybrid(fields, mlps + [_read_experts(fields)] * (num_layers - num_dense))


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("moe_intermediate_size", 1792)
    plain = fields.with_values(fields.values | {"hidden_act": None})  # LFM2 has no such field
    experts = read_experts(plain, inner, num_experts=32, top_k=4)
    return replace(
        experts,
        scoring="sigmoid",
        correction_bias=fields.flag("use_expert_bias", True),
        renormalize=fields.flag("norm_topk_prob", True),
        total_eps=1e-6,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


module_weights = named_weights
