"""The language model of Llama 3.2 Vision: Llama, whose layers with cross-attention to images are
left out for text. Its tower for images is not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig

_MORE_TOKENS = 8
"""So many rows the table of embeddings has that the LM head lacks: those of images."""
_CROSSING = [3, 8, 13, 18, 23, 28, 33, 38]
_NOTHING = LayerSpec(mixer=None, mlp=None, norms=LayerNorms())


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_values(fields.values | {"head_dim": None})  # it has no such field
    if fields.flag("tie_word_embeddings", False):
        raise fields.error("tie_word_embeddings true is not supported")
    positions, num_layers = read_positions(fields, 131_072), read_num_layers(fields)
    attention = read_attention(fields, num_kv_heads=8)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=500_000.0)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=read_mlp(fields))
    crossing = _read_crossing(fields)
    layers = [_NOTHING if index in crossing else layer for index in range(num_layers)]
    model = read_model(fields, layers, positions)
    return replace(
        model,
        norm=read_norm(fields, default=1e-5),
        vocab_size=model.vocab_size + _MORE_TOKENS,
        num_outputs=model.vocab_size,
        skipped_prefixes=tuple(f"model.layers.{index}." for index in sorted(crossing)),
    )


def _read_crossing(fields: Fields) -> set[int]:
    """Returns the layers with cross-attention."""
    found: Any = fields.values.get("cross_attention_layers")
    found = _CROSSING if found is None else found
    if not isinstance(found, list) or any(type(each) is not int for each in found):
        raise fields.error("'cross_attention_layers' must list numbers of layers")
    return set(found)
