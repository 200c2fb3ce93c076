"""ERNIE 4.5: Llama in which neighbouring elements rotate together."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import LayerSpec


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent({"head_dim": 128})
    positions = read_positions(fields, 131_072)
    bias = fields.flag("use_bias", False)
    attention = read_attention(fields, num_kv_heads=2, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(
        fields, positions, attention.head_dim, theta=500_000.0, interleaved=True
    )
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=read_mlp(fields, bias=bias))
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    return replace(model, norm=read_norm(fields, default=1e-5))
