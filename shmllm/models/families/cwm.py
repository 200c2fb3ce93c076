"""CWM (Code World Model): Llama with a window in three of four layers; the first of four reads all
positions."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_windows,
)
from shmllm.models.rope_config import RopeConfig

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotation of a file that has no parameters of one."""


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131_072)
    attention = read_attention(fields, num_kv_heads=8, head_dim=128)
    of_rope = fields
    if fields.values.get("rope_scaling") is None:
        of_rope = fields.with_defaults({"rope_parameters": _ROPE})
    rope = RopeConfig.from_fields(of_rope, positions, attention.head_dim, theta=1e6)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=mlp)
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if index % 4 else FULL for index in range(num_layers))
    windows = windows_by_type(fields, types, read_window(fields, 8192))
    model = read_model(fields, with_windows(layer, windows), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))
