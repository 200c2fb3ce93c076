"""OLMoE: experts in every layer; queries and keys have norms over all heads."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    with_rope,
)


def configure(fields: Fields) -> ModelConfig:
    if fields.values.get("clip_qkv") is not None:
        raise fields.error("'clip_qkv' is not supported; supported: null")
    positions = read_positions(fields, 4096)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    attention = replace(with_rope(attention, fields, positions), qk_norm="row")
    experts = read_experts(fields, fields.integer("intermediate_size"), num_experts=64, top_k=8)
    experts = replace(experts, renormalize=fields.flag("norm_topk_prob", False))
    layers = [LayerSpec(mixer=attention, mlp=experts)] * read_num_layers(fields)
    return replace(read_model(fields, layers, positions), norm=read_norm(fields, default=1e-5))
