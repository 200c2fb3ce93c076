"""MiMo-V2-Flash: most layers attend to a window, with sinks and other heads than the layers that
attend to all positions; values are narrower than keys; experts chosen by sigmoids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice, read_sigmoid_experts
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    SPARSE,
    read_attention,
    read_layer_types,
    read_mlp,
    read_mlp_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, str | int | None] = {
    "attention_projection_layout": "split",
    "hybrid_block_size": None,
    "n_shared_experts": None,
}
"""Fields of published models that transformers does not read, and what they must say."""
_THETAS = {FULL: 5_000_000.0, SLIDING: 10_000.0}
_PARTIAL = 0.334
_SINKS = {".self_attn.sinks": ".self_attn.attention_sink_bias"}


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    num_layers = read_num_layers(fields)
    types = _read_types(fields, num_layers)
    mixers = {kind: _read_mixer(fields, kind) for kind in set(types)}
    plain = fields.with_values(fields.values | {"n_shared_experts": 0, "moe_layer_freq": None})
    experts = read_sigmoid_experts(plain, inner=2048, num_experts=256)
    layers = [
        LayerSpec(mixer=mixers[kind], mlp=experts if has_experts else read_mlp(fields))
        for kind, has_experts in zip(types, _read_experts(fields, num_layers), strict=True)
    ]
    model = read_model(fields, layers, _positions(fields))
    eps = fields.number("layernorm_epsilon", 1e-5)
    prefixes = ("model.mtp.",)  # layers that predict further tokens
    return replace(model, norm=read_norm(fields, default=eps), skipped_prefixes=prefixes)


def _positions(fields: Fields) -> int:
    return read_positions(fields, 131_072)


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = read_layer_types(fields, num_layers)
    if types is not None:
        return types
    pattern = read_pattern(fields, "hybrid_layer_pattern", num_layers)
    if pattern is None:
        pattern = [index > 0 and (index + 1) % 6 > 0 for index in range(num_layers)]
    return tuple(SLIDING if has_window else FULL for has_window in pattern)


def _read_experts(fields: Fields, num_layers: int) -> list[bool]:
    """Returns for each layer whether it has experts."""
    types = read_mlp_types(fields, num_layers)
    if types is not None:
        return [kind == SPARSE for kind in types]
    pattern = read_pattern(fields, "moe_layer_freq", num_layers)
    return [index > 0 for index in range(num_layers)] if pattern is None else pattern


def read_pattern(fields: Fields, name: str, num_layers: int) -> list[bool] | None:
    """Returns a list of 0 or 1 for each layer, as published files have them; None: there is
    none."""
    pattern: Any = fields.values.get(name)
    if pattern is None:
        return None
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise fields.error(f"{name!r} must list 0 or 1 for each of {num_layers} layers")
    if any(type(each) is not int or each not in (0, 1) for each in pattern):
        raise fields.error(f"{name!r} must list 0 or 1 for each layer")
    return [each == 1 for each in pattern]


def _read_mixer(fields: Fields, kind: str) -> AttentionSpec:
    """Returns the attention of layers of a type."""
    bias = fields.flag("attention_bias", False)
    full = fields.with_defaults({"num_key_value_heads": 4, "v_head_dim": 128, "head_dim": 192})
    own = full if kind == FULL else _with_own_heads(full)
    attention = replace(
        read_attention(own, bias=bias),
        value_dim=own.integer("v_head_dim"),
        output_scale=fields.number("attention_value_scale", _value_scale(fields)),
        rope=_read_rope(own, kind),
    )
    if kind == FULL:
        return replace(attention, sinks=fields.flag("add_full_attention_sink_bias", False))
    sinks = fields.null_as_false("add_swa_attention_sink_bias")
    return replace(
        attention,
        sinks=sinks.flag("add_swa_attention_sink_bias", True),
        window=_read_window(fields),
    )


def _with_own_heads(fields: Fields) -> Fields:
    """Returns the fields of layers with a window under the names of the others."""
    kv_heads = 2 * fields.integer("num_key_value_heads")
    names = "num_attention_heads", "head_dim", "v_head_dim"
    own = {name: (f"swa_{name}", fields.values.get(name)) for name in names}
    return fields.under_names(
        own | {"num_key_value_heads": ("swa_num_key_value_heads", kv_heads)}
    ).with_defaults({name: fields.values.get(name) for name in names})


def _value_scale(fields: Fields) -> float:
    """Returns what the factor of values is where no number says it: null is 1."""
    return 1.0 if "attention_value_scale" in fields.values else 0.707


def _read_window(fields: Fields) -> int:
    """Returns the number of positions that a token attends to, its own included. It is not part of
    ``sliding_window_size``, as in transformers."""
    size = fields.optional_integer("sliding_window_size")
    return fields.integer("sliding_window", 129) if size is None else size + 1


def _read_rope(fields: Fields, kind: str) -> RopeConfig:
    """Returns the rotation of a type of layers: that in ``rope_parameters``, or of the fields that
    published files have."""
    if fields.values.get("rope_parameters") is None:
        name = "rope_theta" if kind == FULL else "swa_rope_theta"
        fields = fields.under_names({"rope_theta": (name, _THETAS[kind])})
    return RopeConfig.from_fields(
        fields,
        _positions(fields),
        fields.integer("head_dim"),
        layer_type=kind,
        theta=_THETAS[kind],
        partial=_PARTIAL,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _SINKS): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations that transformers' modules name otherwise."""
    return {name: views for name, views in weights.items() if name.endswith(".sinks")}
