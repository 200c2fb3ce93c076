"""AFMoE (Arcee Trinity): attention with gates, in windows, and every few layers over all positions
without rotation; norms before and behind attention and MLP; experts chosen by sigmoids."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
)
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
)
_ONLY: dict[str, str | int] = {
    "attention_bias": False,
    "score_func": "sigmoid",
    "route_norm": True,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
}
"""Fields, most of which transformers does not read, and what they must say."""
_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.gate.": ".mlp.router.gate.",
}
"""The parts of names that differ from the default ones, in files and in transformers' modules."""


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    experts, num_dense = _read_experts(fields), fields.integer("num_dense_layers", 1, minimum=0)
    layers = [
        LayerSpec(mixer=mixer, mlp=read_mlp(fields) if index < num_dense else experts, norms=_NORMS)
        for index, mixer in enumerate(_read_mixers(fields))
    ]
    model = read_model(fields, layers, _positions(fields))
    scale = math.sqrt(model.hidden_size) if fields.flag("mup_enabled", False) else 1.0
    norm = read_norm(fields, default=1e-5)
    return replace(model, norm=norm, embedding_scale=scale, embeds_scale=scale)


def _positions(fields: Fields) -> int:
    return read_positions(fields, 16_384)


def _read_mixers(fields: Fields) -> list[AttentionSpec]:
    attention = replace(
        read_attention(fields, head_dim=128), qk_norm="head", gated=True, gates_apart=True
    )
    rotated, num_layers = with_rope(attention, fields, _positions(fields)), read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        period = fields.integer("global_attn_every_n_layers", 4)
        types = tuple(SLIDING if (i + 1) % period else FULL for i in range(num_layers))
    return [
        attention if window is None else replace(rotated, window=window)
        for window in windows_by_type(fields, types, read_window(fields, 1024))
    ]


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("moe_intermediate_size", 1408)
    num_shared = fields.integer("num_shared_experts", 2, minimum=0)
    return replace(
        read_experts(fields, inner, num_experts=64, top_k=6),
        scoring="sigmoid",
        renormalize=True,
        correction_bias=True,
        router_float32=True,
        weight_scale=fields.number("route_scale", 1.0),
        shared=MLPSpec(inner=inner * num_shared) if num_shared else None,
        shared_name="shared_experts",
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


module_weights = named_weights
