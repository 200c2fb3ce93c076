"""DeepSeek-MoE (the first one, 16B): Llama's attention; experts chosen by a softmax, beside others
that all tokens go to. The defaults are those of the model's own configuration class."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice, read_routed_experts, with_dense_layers
from shmllm.models.fields import Fields
from shmllm.models.readers import read_attention, read_model, read_positions, with_rope


def configure(fields: Fields) -> ModelConfig:
    check_choice(fields, "scoring_func", "softmax")
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    experts = replace(
        read_routed_experts(fields, inner=1407, num_experts=None, top_k=None, num_shared=0),
        renormalize=fields.flag("norm_topk_prob", False),
        router_float32=False,
    )
    layers = with_dense_layers(fields, with_rope(attention, fields, positions), experts, default=0)
    return read_model(fields, layers, positions)
