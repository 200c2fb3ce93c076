"""ERNIE 4.5: Llama in which neighbouring elements rotate together."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig


def configure(fields: Fields, *, interleaved: bool = True) -> ModelConfig:
    """
    Args:
        fields: the fields of config.json.
        interleaved: see `RopeConfig`.
    """
    fields = fields.with_absent({"head_dim": 128})
    attention = read_ernie_attention(fields, num_kv_heads=2, interleaved=interleaved)
    mlp = read_mlp(fields, bias=fields.flag("use_bias", False))
    layer = LayerSpec(mixer=attention, mlp=mlp)
    return ernie_model(fields, [layer] * read_num_layers(fields))


def read_ernie_attention(
    fields: Fields, *, num_kv_heads: int, interleaved: bool = True
) -> AttentionSpec:
    """Returns the attention with its rotation.

    Args:
        fields: the fields of config.json.
        num_kv_heads: the default of ``num_key_value_heads``.
        interleaved: see `RopeConfig`.
    """
    bias = fields.flag("use_bias", False)
    attention = read_attention(fields, num_kv_heads=num_kv_heads, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(
        fields, _positions(fields), attention.head_dim, theta=500_000.0, interleaved=interleaved
    )
    return replace(attention, rope=rope)


def ernie_model(fields: Fields, layers: list[LayerSpec]) -> ModelConfig:
    """Returns the configuration with what ERNIE's models have in common."""
    model = read_model(fields, layers, _positions(fields), tied=True)
    return replace(model, norm=read_norm(fields, default=1e-5))


def _positions(fields: Fields) -> int:
    return read_positions(fields, 131_072)
