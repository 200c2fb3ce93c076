"""Bamba: layers of Mamba 2, and some of attention that rotates half of each head."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.jamba import NORMS, named_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mamba_fields import HYBRID_MAMBA2, read_mamba2
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

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    num_layers, positions = read_num_layers(fields), read_positions(fields, 262144)
    mamba = read_mamba2(fields.null_as_false("mamba_conv_bias"), HYBRID_MAMBA2)
    chosen = _attention_layers(fields)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    attention = _read_attention(fields, positions) if chosen else mamba
    layers = [
        LayerSpec(mixer=attention if index in chosen else mamba, mlp=mlp, norms=NORMS)
        for index in range(num_layers)
    ]
    model = read_model(fields, layers, positions)
    return replace(model, norm=read_norm(fields, default=1e-5))


def _read_attention(fields: Fields, positions: int) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=8, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.5)
    return replace(attention, rope=rope)


def _attention_layers(fields: Fields) -> list[int]:
    found = fields.values.get("attn_layer_indices") or []
    if not isinstance(found, list) or any(type(index) is not int for index in found):
        raise fields.error(f"'attn_layer_indices' must list numbers of layers, not {found!r}")
    return found
