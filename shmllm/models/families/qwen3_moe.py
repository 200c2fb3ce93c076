"""Qwen 3 MoE: Qwen 3 with experts in some layers, and other defaults."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.qwen2_moe import with_dense_mlps
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    with_rope,
    with_windows,
)


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 32768)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=4, bias=bias, output_bias=bias)
    attention = replace(with_rope(attention, fields, positions), qk_norm="head")
    inner = fields.integer("moe_intermediate_size", 768)
    experts = read_experts(fields, inner, num_experts=128, top_k=8)
    experts = replace(experts, renormalize=fields.flag("norm_topk_prob", False))
    enabled = fields.flag("use_sliding_window", False)
    window = read_window(fields, 4096) if enabled else None
    layer = LayerSpec(mixer=attention, mlp=experts)
    layers = with_windows(layer, [window] * read_num_layers(fields))
    return read_model(fields, with_dense_mlps(fields, layers), positions)
