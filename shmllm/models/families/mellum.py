"""Mellum 2: Qwen 3's attention, in layers with a window and in those without, whose rotations
differ; experts in most layers, chosen by a softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shmllm.models.config import ModelConfig
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
    read_window,
    windows_by_type,
)
from shmllm.models.specs import MLPSpec, MoESpec

_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""The rotations of a file that has no parameters of them."""
_POSITIONS = 131_072


def configure(fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    experts = read_experts(
        fields, fields.integer("moe_intermediate_size", 896), num_experts=64, top_k=8
    )
    experts = replace(experts, renormalize=fields.flag("norm_topk_prob", True))
    types = read_mlp_types(fields, num_layers) or (SPARSE,) * num_layers
    kinds: dict[str, MLPSpec | MoESpec] = {SPARSE: experts}
    if DENSE in types:
        kinds[DENSE] = read_mlp(fields)
    layers = [
        LayerSpec(mixer=mixer, mlp=kinds[kind])
        for mixer, kind in zip(_mixers(fields, num_layers), types, strict=True)
    ]
    return read_model(fields, layers, read_positions(fields, _POSITIONS))


def _mixers(fields: Fields, num_layers: int) -> Iterable[AttentionSpec]:
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=4, head_dim=128, bias=bias, output_bias=bias)
    types = read_layer_types(fields, num_layers) or (FULL,) * num_layers
    positions = read_positions(fields, _POSITIONS)
    ropes = {
        kind: read_rope_of_type(fields, positions, attention.head_dim, kind, _ROPES, partial=1.0)
        for kind in set(types)
    }
    windows = windows_by_type(fields, types, read_window(fields, 1024))
    for kind, window in zip(types, windows, strict=True):
        yield replace(attention, window=window, rope=ropes[kind], qk_norm="head")
