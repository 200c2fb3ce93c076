"""FlexOlmo: OLMo 2 with experts in place of each MLP."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.olmo2 import NORMS, read_olmo_attention
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_experts, read_model, read_num_layers, read_positions
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 4096)
    attention = read_olmo_attention(fields)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=500_000.0)
    inner = fields.integer("intermediate_size", 11_008)
    experts = replace(
        read_experts(fields, inner, num_experts=7, top_k=5),
        renormalize=fields.flag("norm_topk_prob", False),
    )
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=experts, norms=NORMS)
    return read_model(fields, [layer] * read_num_layers(fields), positions)
