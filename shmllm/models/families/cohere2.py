"""Cohere 2: attention and MLP side by side behind one LayerNorm; only layers with a window rotate,
neighbouring elements together."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import NormSpec

NORMS = LayerNorms(before_mixer="input_layernorm")


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 8192)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, interleaved=True)
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        pattern = fields.integer("sliding_window_pattern", 4)
        types = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    windows = windows_by_type(fields, types, read_window(fields, 4096))
    layers = [
        LayerSpec(
            mixer=replace(attention, window=window, rope=None if window is None else rope),
            mlp=read_mlp(fields),
            norms=NORMS,
            parallel=True,
        )
        for window in windows
    ]
    return cohere_model(fields, layers, positions)


def cohere_model(
    fields: Fields, layers: list[LayerSpec], positions: int, *, logits_scale: float = 0.0625
) -> ModelConfig:
    """Returns the configuration with what Cohere's models have in common; ``logit_scale`` is by
    default `logits_scale`."""
    return replace(
        read_model(fields, layers, positions, tied=True),
        norm=NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5)),
        logits_scale=fields.number("logit_scale", logits_scale),
    )
