"""Laguna: attention with gates by softplus, of heads or of their elements, in layers whose numbers
of heads, windows and rotations differ; experts chosen by sigmoids beside one for all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp,
    read_mlp_types,
    read_model,
    read_num_layers,
    read_positions,
    read_rope_of_type,
    windows_by_type,
)
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""The rotations of a file that has no parameters of them."""
_OF_HEADS, _OF_ELEMENTS = "per-head", "per-element"
_GATES = {".self_attn.gate_proj.": ".self_attn.g_proj."}
_IN_FILES = {
    **_GATES,
    ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
}


def configure(fields: Fields) -> ModelConfig:
    check_choice(fields, "attention_bias", False)
    check_choice(fields, "moe_apply_router_weight_on_input", False)
    check_choice(fields, "moe_router_logit_softcapping", 0)
    num_layers = read_num_layers(fields)
    types = read_mlp_types(fields, num_layers) or (DENSE, *(SPARSE,) * (num_layers - 1))
    kinds: dict[str, MLPSpec | MoESpec] = {}
    if SPARSE in types:
        kinds[SPARSE] = _read_experts(fields)
    if DENSE in types:
        kinds[DENSE] = read_mlp(fields.with_defaults({"intermediate_size": 8192}))
    layers = [
        LayerSpec(mixer=mixer, mlp=kinds[kind])
        for mixer, kind in zip(_read_mixers(fields, num_layers), types, strict=True)
    ]
    return read_model(fields, layers, _positions(fields))


def _positions(fields: Fields) -> int:
    return read_positions(fields, 131_072)


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("moe_intermediate_size", 512)
    return replace(
        read_experts(fields, inner, num_experts=256, top_k=8),
        scoring="sigmoid",
        renormalize=True,
        correction_bias=True,
        weight_scale=fields.number("moe_routed_scaling_factor", 1.0),
        shared=MLPSpec(inner=fields.integer("shared_expert_intermediate_size", 512)),
        shared_module="shared_experts",
    )


def _read_mixers(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    types = read_layer_types(fields, num_layers) or (FULL,) * num_layers
    positions, head_dim = _positions(fields), fields.integer("head_dim", 128)
    ropes = {
        kind: read_rope_of_type(fields, positions, head_dim, kind, _ROPES, partial=1.0)
        for kind in set(types)
    }
    windows = windows_by_type(fields, types, fields.integer("sliding_window", 512))
    of_heads = _has_gates_of_heads(fields)
    return [
        replace(
            read_attention(own, num_kv_heads=8, head_dim=128),
            window=window,
            rope=ropes[kind],
            qk_norm="head",
            gated=True,
            gate="softplus",
            gates_of_heads=of_heads,
            gates_apart=True,
        )
        for kind, window, own in zip(types, windows, _own_heads(fields, num_layers), strict=True)
    ]


def _own_heads(fields: Fields, num_layers: int) -> list[Fields]:
    """Returns the fields of each layer, with its number of heads."""
    counts: Any = fields.values.get("num_attention_heads_per_layer")
    if counts is None:
        return [fields] * num_layers
    if not isinstance(counts, list) or len(counts) != num_layers:
        raise fields.error(
            f"'num_attention_heads_per_layer' must list a number for each of {num_layers} layers"
        )
    return [fields.with_values(fields.values | {"num_attention_heads": each}) for each in counts]


def _has_gates_of_heads(fields: Fields) -> bool:
    gating = fields.values.get("gating", True)
    if gating not in (True, _OF_HEADS, _OF_ELEMENTS):
        raise fields.error(
            f"gating {gating!r} is not supported; supported: {_OF_HEADS!r}, {_OF_ELEMENTS!r}"
        )
    types: Any = fields.values.get("gating_types")
    wanted = _OF_ELEMENTS if gating == _OF_ELEMENTS else _OF_HEADS
    known = wanted, wanted.replace("-", "_")
    if types is not None and any(each not in known for each in types):
        raise fields.error(f"'gating_types' other than {wanted!r} are not supported")
    return bool(gating != _OF_ELEMENTS)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _IN_FILES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations that transformers' modules name otherwise."""
    end = ".mlp.gate.e_score_correction_bias"
    return {name: views for name, views in weights.items() if name.endswith(end)}
