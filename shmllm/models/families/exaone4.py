"""EXAONE 4: norms behind attention and MLP, and of each head of queries and keys. In models that
have windows, only the layers with one rotate."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.olmo2 import NORMS, olmo_model
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
)

POSITIONS = 2048
"""The default of ``max_position_embeddings``."""


def configure(fields: Fields) -> ModelConfig:
    mlp = read_mlp(fields)
    layers = [LayerSpec(mixer=mixer, mlp=mlp, norms=NORMS) for mixer in read_mixers(fields)]
    return olmo_model(fields, layers, read_positions(fields, POSITIONS))


def read_mixers(fields: Fields) -> list[AttentionSpec]:
    """Returns the attention of each layer."""
    attention = replace(read_attention(fields, num_kv_heads=32), qk_norm="head")
    attention = with_rope(attention, fields, read_positions(fields, POSITIONS))
    window, num_layers = read_window(fields, 4096), read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        pattern = 1 if window is None else fields.integer("sliding_window_pattern", 4)
        types = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    return [
        replace(attention, window=own, rope=None if window and own is None else attention.rope)
        for own in windows_by_type(fields, types, window)
    ]
