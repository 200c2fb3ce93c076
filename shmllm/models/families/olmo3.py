"""OLMo 3: OLMo 2 with three windows for each full layer, which alone extend the context."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.olmo2 import NORMS, olmo_model, read_olmo_attention
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_positions,
    read_rope_of_windows,
    read_window,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig

THETA = 500_000.0


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    attention = read_olmo_attention(fields)
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if (i + 1) % 4 else FULL for i in range(num_layers))
    windows = windows_by_type(fields, types, read_window(fields, 4096))
    ropes = {
        FULL: RopeConfig.from_fields(
            fields, positions, attention.head_dim, layer_type=FULL, theta=THETA
        ),
        SLIDING: read_rope_of_windows(
            fields, positions, attention.head_dim, theta=fields.number("rope_theta", THETA)
        ),
    }
    layers = [
        LayerSpec(
            mixer=replace(attention, window=window, rope=ropes[kind]),
            mlp=read_mlp(fields),
            norms=NORMS,
        )
        for window, kind in zip(windows, types, strict=True)
    ]
    return olmo_model(fields, layers, positions)
