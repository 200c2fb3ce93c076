"""Mistral 4: latent attention with queries that grow with their position; experts chosen by a
softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    check_choice,
    read_latent_attention,
    read_routed_experts,
    with_dense_layers,
)
from shmllm.models.families.ministral3 import read_growth
from shmllm.models.fields import Fields
from shmllm.models.readers import read_model, read_positions

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS = {"kv_lora_rank": 256, "rope_parameters": _ROPE}
_SHARE = "partial_rotary_factor"


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS).null_as_false("rope_interleave", "norm_topk_prob")
    rope = {name: x for name, x in fields.table("rope_parameters").items() if name != _SHARE}
    fields = fields.with_values(fields.values | {"rope_parameters": rope})  # widths say the share
    positions = read_positions(fields, 1048576)
    attention = read_latent_attention(
        fields,
        positions,
        interleaved=fields.flag("rope_interleave", True),
        query_rank=1024,
        nope_dim=64,
    )
    check_choice(fields, "n_group", 1)
    experts = read_routed_experts(fields, inner=2048, num_experts=128, top_k=4, num_shared=1)
    experts = replace(
        experts,
        router_float32=False,
        renormalize=fields.flag("norm_topk_prob", True),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        whole=True,
    )
    attention = replace(attention, growth=read_growth(fields))
    layers = with_dense_layers(fields, attention, experts, default=0)
    return read_model(fields, layers, positions)
