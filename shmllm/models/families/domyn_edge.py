"""Domyn Edge: norms on both sides, and of each head, those of queries without weights. Layers with
a window rotate narrow heads, the others rotate none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    read_attention,
    read_layer_types,
    read_mlp,
    read_model,
    read_num_layers,
    read_own_fields,
    read_positions,
    with_rope,
)
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

ROPE, NOPE = "rope", "nope"
"""Whether a layer rotates queries and keys, as in the field ``position_layers``."""
_KINDS = [NOPE] * 2 + [ROPE, ROPE, ROPE, NOPE] * 8 + [NOPE] * 2
_WIDTHS, _WINDOWS = {ROPE: 64, NOPE: 256}, {ROPE: [1024, 0], NOPE: [-1, 0]}
_DEFAULTS = {
    "num_hidden_layers": len(_KINDS),
    "position_layers": _KINDS,
    "head_sizes": [_WIDTHS[kind] for kind in _KINDS],
    "window_sizes": [_WINDOWS[kind] for kind in _KINDS],
}
"""The defaults of fields that are lists."""
_NORMS = LayerNorms(
    before_mixer="pre_attention_norm",
    after_mixer="post_attention_norm",
    before_mlp="pre_feedforward_norm",
    after_mlp="post_feedforward_norm",
)
_NAMES = {".self_attn.": ".attention.", ".mlp.": ".feedforward."}


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias is not supported")
    fields, positions = fields.with_defaults(_DEFAULTS), read_positions(fields, 8192)
    num_layers, mlp = read_num_layers(fields), read_mlp(fields)
    kinds = read_layer_types(fields, num_layers, (ROPE, NOPE), "position_layers")
    assert kinds is not None, "the field has a default"
    windows, widths = _read_windows(fields, num_layers), _read_widths(fields, num_layers)
    layers = []
    for kind, window, width in zip(kinds, windows, widths, strict=True):
        attention = _read_attention(fields, width)
        if kind == ROPE:
            attention = with_rope(attention, fields, positions)
        layers.append(LayerSpec(mixer=replace(attention, window=window), mlp=mlp, norms=_NORMS))
    return read_model(fields, layers, positions, tied=True)


def _read_attention(fields: Fields, width: int) -> AttentionSpec:
    own = fields.with_values(fields.values | {"head_dim": width})
    attention = read_attention(own, num_kv_heads=8)
    return replace(attention, qk_norm="head", weighs_queries=False)


def _read_list(fields: Fields, name: str, num_layers: int) -> list[Any]:
    values: Any = fields.values[name]
    if not isinstance(values, list) or len(values) != num_layers:
        raise fields.error(f"{name!r} must be a list for {num_layers} layers")
    return values


def _read_windows(fields: Fields, num_layers: int) -> list[int | None]:
    """Returns the window of each layer. The field has how many tokens before its own a token
    attends to, -1 for all, and 0."""
    windows: list[int | None] = []
    for pair in _read_list(fields, "window_sizes", num_layers):
        is_pair = isinstance(pair, list) and len(pair) == 2 and pair[1] == 0
        if not is_pair or type(pair[0]) is not int or pair[0] < -1 or pair[0] == 0:
            raise fields.error(f"{pair!r} in 'window_sizes' is not supported; supported: [w, 0]")
        windows.append(None if pair[0] == -1 else pair[0] + 1)
    return windows


def _read_widths(fields: Fields, num_layers: int) -> list[int]:
    """Returns the width of each layer's heads: what ``per_layer_config`` has for it as transformers
    writes fields that differ, or ``head_sizes``."""
    if "per_layer_config" in fields.values:
        own = (read_own_fields(fields, index, {"head_dim"}) for index in range(num_layers))
        default = fields.optional_integer("head_dim")
        return [each.integer("head_dim", default) for each in own]
    widths = _read_list(fields, "head_sizes", num_layers)
    return [Fields({"head_sizes": each}, fields.where).integer("head_sizes") for each in widths]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
