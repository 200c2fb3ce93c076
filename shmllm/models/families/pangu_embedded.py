"""openPangu Embedded: Llama with one field for the biases of attention. The defaults are those of
the models' own configuration class."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig

_ONLY: dict[str, str | bool | int | None] = {
    "interleaved_sliding_window": None,
    "is_causal": True,
    "mlp_bias": False,
    "n_routed_experts": None,
    "param_sink_number": 0,
    "sandwich_norm": False,
}
"""Fields of openPangu's other models, and what those of this family say."""


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    bias = fields.flag("bias", True)
    for name in ("attention_bias", "qkv_bias"):
        check_choice(fields, name, bias)
    positions = read_positions(fields, 32_768)
    attention = read_attention(fields, num_kv_heads=8, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=16e6)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=read_mlp(fields))
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))
