"""Hunyuan 1 without experts: query and key heads are normalised behind the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {
    ".self_attn.q_norm.": ".self_attn.query_layernorm.",
    ".self_attn.k_norm.": ".self_attn.key_layernorm.",
}


def configure(fields: Fields) -> ModelConfig:
    layer = LayerSpec(mixer=read_hunyuan_attention(fields), mlp=read_mlp(fields))
    return hunyuan_model(fields, [layer] * read_num_layers(fields))


def read_hunyuan_attention(fields: Fields) -> AttentionSpec:
    """Returns the attention, which has norms."""
    if fields.flag("use_cla", False):
        raise fields.error("use_cla true is not supported: layers that share keys and values")
    if not fields.flag("use_qk_norm", True):
        raise fields.error("use_qk_norm false is not supported; transformers ignores it")
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = _with_static_angles(fields, attention.head_dim)
    attention = with_rope(attention, rope, read_positions(fields, 2048))
    return replace(attention, qk_norm="head", norms_rotated=True)


def _with_static_angles(fields: Fields, head_dim: int) -> Fields:
    """Returns the fields with the base of the wavelengths that ``alpha`` stretches. Its type is
    called "dynamic", but the angles do not depend on the length of a request."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = Fields(fields.table(name), f"{fields.where}: {name}")
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind == "dynamic" and (alpha := rope.optional_number("alpha")) is not None:
            theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
            stretched = theta * alpha ** (head_dim / (head_dim - 2))
            plain = {"rope_type": "default", "rope_theta": stretched}
            return fields.with_values(fields.values | {name: plain})
    return fields


def hunyuan_model(fields: Fields, layers: list[LayerSpec]) -> ModelConfig:
    """Returns the configuration of a model with these layers."""
    model = read_model(fields, layers, read_positions(fields, 2048))
    return replace(model, norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
