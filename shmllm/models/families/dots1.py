"""dots.llm1: Qwen 3's attention, windows in the last layers; DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import read_sigmoid_experts, with_dense_layers
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
)


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=32, bias=bias, output_bias=bias)
    attention = replace(with_rope(attention, fields, positions), qk_norm="head")
    experts = read_sigmoid_experts(
        fields, inner=1408, num_experts=None, top_k=None, num_shared=0, renormalize=False
    )
    layers = []
    plain = with_dense_layers(fields, attention, experts, default=0)
    for layer, window in zip(plain, _windows(fields), strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
    return read_model(fields, layers, positions)


def _windows(fields: Fields) -> tuple[int | None, ...]:
    num_layers = read_num_layers(fields)
    window = read_window(fields, 4096)
    types = read_layer_types(fields, num_layers)
    if types is None:
        first = fields.integer("max_window_layers", 62, minimum=0)
        has_windows = window is not None
        types = tuple(
            SLIDING if has_windows and index >= first else FULL for index in range(num_layers)
        )
    return windows_by_type(fields, types, window)
