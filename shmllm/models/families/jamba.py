"""Jamba: layers of Mamba, with norms of time steps' rank, B and C, and some of attention without
rotation; every other layer has experts in place of its MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mamba_fields import Names, read_mamba
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: Names = {
    "state_size": ("mamba_d_state", 16),
    "rank": ("mamba_dt_rank", "auto"),
    "taps": ("mamba_d_conv", 4),
    "bias": ("mamba_proj_bias", False),
    "convolution_bias": ("mamba_conv_bias", True),
    "expand": ("mamba_expand", 2),
    "activation": ("hidden_act", "silu"),
}
NORMS = LayerNorms(before_mixer="input_layernorm", before_mlp="pre_ff_layernorm")
NAMES = {
    ".mlp.gate.": ".feed_forward.router.",
    ".mlp.": ".feed_forward.",
    "model.norm.": "model.final_layernorm.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    mamba = read_mamba(fields, _FIELDS, "weights", read_norm(fields).eps)
    has_attention = _every(fields, num_layers, "attn_layer", 8, 4)
    attention: MixerSpec = read_attention(fields, num_kv_heads=8) if any(has_attention) else mamba
    feed_forward = _read_feed_forward(fields, num_layers)
    layers = [
        LayerSpec(mixer=attention if attends else mamba, mlp=mlp, norms=NORMS)
        for attends, mlp in zip(has_attention, feed_forward, strict=True)
    ]
    model = read_model(fields, layers, read_positions(fields, 262144))
    return replace(model, norm=read_norm(fields))


def _read_feed_forward(fields: Fields, num_layers: int) -> list[FeedForwardSpec]:
    mlp = read_mlp(fields)
    if fields.integer("num_experts", 16) == 1:
        return [mlp] * num_layers
    experts = read_experts(fields, mlp.inner, num_experts=16, top_k=2)
    chosen = _every(fields, num_layers, "expert_layer", 2, 1)
    return [experts if is_chosen else mlp for is_chosen in chosen]


def _every(fields: Fields, num_layers: int, name: str, period: int, offset: int) -> list[bool]:
    """Returns which layers the fields ``name_period`` and ``name_offset``, with these defaults,
    choose."""
    period = fields.integer(f"{name}_period", period)
    offset = fields.integer(f"{name}_offset", offset, minimum=0)
    if offset >= period:
        raise fields.error(f"{name}_offset ({offset}) must be below {name}_period ({period})")
    return [index % period == offset for index in range(num_layers)]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    def renamed(name: str) -> str:
        for part, own in NAMES.items():
            name = name.replace(part, own)
        return name

    return {renamed(name): views for name, views in weights.items()}


module_weights = named_weights
