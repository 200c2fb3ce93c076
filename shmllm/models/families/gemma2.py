"""Gemma 2: Gemma 3 without norms of queries and keys; every other layer has a window."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.gemma3 import NORMS, gemma_model, read_gemma_attention, read_gemma_mlp
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_layer_types,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
    with_windows,
)

ATTENTION_CAP, LOGITS_CAP = 50.0, 30.0
"""The caps of files that do not name theirs; null switches a cap off."""


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention is not supported: attention is causal")
    positions = read_positions(fields, 8192)
    attention = with_rope(read_gemma_attention(fields, num_kv_heads=4), fields, positions)
    if "attn_logit_softcapping" not in fields.values:
        attention = replace(attention, soft_cap=ATTENTION_CAP)
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    windows = windows_by_type(fields, types, read_window(fields, 4096))
    layer = LayerSpec(mixer=attention, mlp=read_gemma_mlp(fields), norms=NORMS)
    model = gemma_model(fields, list(with_windows(layer, windows)), positions)
    if "final_logit_softcapping" not in fields.values:
        model = replace(model, logits_cap=LOGITS_CAP)
    return model
