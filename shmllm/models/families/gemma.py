"""Gemma 1: Gemma 2 without norms behind attention and MLP, windows and caps."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.gemma3 import gemma_model
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_mlp,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import MLPSpec

_TANH = "gelu_pytorch_tanh"


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention is not supported: attention is causal")
    positions = read_positions(fields, 8192)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=16, head_dim=256, bias=bias, output_bias=bias)
    attention = with_rope(attention, fields, positions)
    layer = LayerSpec(mixer=attention, mlp=_read_mlp(fields))
    return gemma_model(fields, [layer] * read_num_layers(fields), positions)


def _read_mlp(fields: Fields) -> MLPSpec:
    """Returns a gated MLP with the activation ``hidden_act``. The first files have "gelu" there,
    and mean the approximation; ``hidden_activation`` beside it must not ask for another one."""
    name = fields.text("hidden_act", _TANH)
    name = _TANH if name == "gelu" else name
    mlp = read_mlp(fields.with_values(fields.values | {"hidden_act": name}))
    if read_activation(fields, "hidden_activation", name) != mlp.activation:
        other = fields.text("hidden_activation")
        raise fields.error(f"hidden_activation {other!r} beside hidden_act {name!r}")
    return mlp
