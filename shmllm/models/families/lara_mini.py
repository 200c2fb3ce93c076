"""Lara Mini: gated delta nets beside attention, which rotates in layers with a window alone;
experts in all layers, and one for all tokens that has no gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.qwen2_moe import read_experts_and_shared
from shmllm.models.families.qwen3_5 import LINEAR, read_delta_net
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
)

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_TYPES = LINEAR, SLIDING, LINEAR, FULL, SLIDING
"""The types of layers of a file that does not say them."""
_NETS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
_NORM = ".linear_attn.norm.", ".linear_attn.out_norm."
"""The names of the norm of a net in transformers' modules and in files."""


def configure(fields: Fields) -> ModelConfig:
    num_layers, positions = read_num_layers(fields), read_positions(fields, 131_072)
    experts = read_experts_and_shared(
        fields,
        inner=512,
        shared_inner=512,
        num_experts=128,
        top_k=4,
        renormalize=fields.flag("norm_topk_prob", True),
    )
    experts = replace(experts, shared_gate=False, whole=True)
    types = read_layer_types(fields, num_layers, (LINEAR, SLIDING, FULL))
    if types is None:
        types = tuple(_TYPES[index % len(_TYPES)] for index in range(num_layers))
    mixers = {kind: _read_mixer(fields, kind, positions) for kind in dict.fromkeys(types)}
    layers = [LayerSpec(mixer=mixers[kind], mlp=experts) for kind in types]
    return read_model(fields, layers, positions, tied=True)


def _read_mixer(fields: Fields, kind: str, positions: int) -> MixerSpec:
    if kind == LINEAR:
        return read_delta_net(fields.with_defaults(_NETS))
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=4, head_dim=128, bias=bias, output_bias=bias)
    attention = replace(attention, qk_norm="head")
    if kind == FULL:
        return attention
    [window] = windows_by_type(fields, [kind], read_window(fields, 512))
    return replace(with_rope(attention, fields, positions), window=window)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under the names of files, which have a net's input projections in
    one tensor."""
    from shmllm.models.delta_net import IN_PROJECTIONS
    from shmllm.models.fused_names import with_fused

    parts = [f"in_proj_{name}" for name in IN_PROJECTIONS]
    fused = with_fused(weights, ("in_proj", parts))
    return {name.replace(*_NORM): views for name, views in fused.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names of transformers' modules that differ."""
    own = ".linear_attn.in_proj_", _NORM[0]
    return {name: views for name, views in weights.items() if any(part in name for part in own)}
