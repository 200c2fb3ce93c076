"""Phi-3.5-MoE: Mixtral with LayerNorms and biases; the two experts of a token have the weights that
SparseMixer gives them (Liu et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.mixtral import named_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    with_windows,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

__all__ = ["configure", "module_weights", "named_weights"]

_THETA = 1e6
_TOP_K = 2
_MODULE_NAMES = {".mlp.gate.": ".mlp.router."}
"""The parts of names that differ in transformers' modules."""


def configure(fields: Fields) -> ModelConfig:
    positions, bias = read_positions(fields, 131_072), fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=8, bias=bias, output_bias=bias)
    rope = _read_rope(fields, positions, attention.head_dim)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=_read_experts(fields))
    windows = [read_window(fields, None)] * read_num_layers(fields)
    return replace(
        read_model(fields, with_windows(layer, windows), positions),
        norm=NormSpec(kind="layer", eps=fields.number("rms_norm_eps", 1e-5), bias=True),
        lm_head_bias=fields.flag("lm_head_bias", False),
    )


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("intermediate_size", 6400)
    experts = read_experts(fields, inner, num_experts=16, top_k=_TOP_K)
    if experts.top_k != _TOP_K:
        raise fields.error(f"num_experts_per_tok {experts.top_k} is not supported, only {_TOP_K}")
    jitter = fields.number("router_jitter_noise", 0.01)
    return replace(experts, scoring="mixer", mixer_limit=2 * jitter)


def _read_rope(fields: Fields, positions: int, head_dim: int) -> RopeConfig:
    """Returns the rotation; with longrope, config.json says the factor of cosines and sines."""
    rope = RopeConfig.from_fields(fields, positions, head_dim, theta=_THETA)
    if rope.type == "default":
        return rope
    if rope.type != "longrope":
        raise fields.error(f"rope type {rope.type!r} is not supported; supported: longrope")
    scaling = fields.table("rope_scaling") or fields.table("rope_parameters")
    found = Fields(scaling, f"{fields.where}: rope_parameters")
    short, long = (found.number(f"{kind}_mscale") for kind in ("short", "long"))
    if short != long:
        raise fields.error(f"short_mscale {short:g} beside long_mscale {long:g} is not supported")
    return replace(rope, attention_factor=long)


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _MODULE_NAMES): views for name, views in weights.items()}
