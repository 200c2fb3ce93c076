"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and a rotation that may be partial."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_window,
    with_windows,
)
from shmllm.models.rope_config import RopeConfig

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 4096)
    attention = read_attention(fields)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=1.0)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=read_mlp(fields))
    windows = [read_window(fields, None)] * read_num_layers(fields)
    model = read_model(fields, with_windows(layer, windows), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import GATE_UP, QKV, with_fused

    return with_fused(weights, QKV, GATE_UP)
