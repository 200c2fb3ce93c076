"""StarCoder 2: LayerNorms and biases, an MLP without a gate, one window for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
    read_window,
    with_rope,
)
from shmllm.models.specs import NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {".mlp.up_proj.": ".mlp.c_fc.", ".mlp.down_proj.": ".mlp.c_proj."}


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 4096)
    bias = fields.flag("use_bias", True)
    attention = read_attention(fields, num_kv_heads=2, bias=bias, output_bias=bias)
    attention = replace(with_rope(attention, fields, positions), window=read_window(fields, None))
    mlp = read_ungated_mlp(fields, activation="gelu_pytorch_tanh", bias=bias)
    layer = LayerSpec(mixer=attention, mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    norm = NormSpec(kind="layer", eps=fields.number("norm_epsilon", 1e-5), bias=True)
    return replace(model, norm=norm)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
