"""Gemma 3n: four residual streams, a branch of low rank beside attention, and sparse MLPs.

Each layer has an input of its own, values have a norm, and the last layers read the keys and values
of earlier ones. Images and sounds are not computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.gemma3 import NORMS, gemma_model
from shmllm.models.families.gemma4 import read_kv_sources, unread_keys
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_activation,
    read_attention,
    read_layer_types,
    read_num_layers,
    read_positions,
    read_rope_of_windows,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec
from shmllm.models.stream_specs import AltUpSpec, PerLayerSpec

MOST_STREAMS = 8

_DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "final_logit_softcapping": 30.0,
}
_NUM_SPARSE, _SPARSITY = 10, 0.95
"""How many of the first layers are sparse by default, in models of more layers, and how sparse."""


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    positions, num_layers = read_positions(fields, 32_768), read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if (index + 1) % 5 else FULL for index in range(num_layers))
    sources = read_kv_sources(fields, types, 15)
    rank = fields.integer("laurel_rank", 64)
    if rank == fields.integer("hidden_size"):  # both products would have one buffer
        raise fields.error(f"laurel_rank ({rank}) must not be hidden_size")
    layers = [
        LayerSpec(
            mixer=replace(attention, source=source),
            mlp=mlp,
            norms=NORMS,
            laurel_rank=rank,
        )
        for attention, source, mlp in zip(
            _read_attentions(fields, types, positions),
            sources,
            _read_mlps(fields, num_layers),
            strict=True,
        )
    ]
    model, altup = gemma_model(fields, layers, positions), _read_altup(fields)
    scales = () if altup.scaled else _unread_scales(num_layers)
    return replace(
        model,
        norm=replace(model.norm, offset=0.0),
        per_layer=_read_per_layer(fields),
        altup=altup,
        skipped_prefixes=(*unread_keys(sources), *scales),
    )


def _read_attentions(fields: Fields, types: tuple[str, ...], positions: int) -> list[AttentionSpec]:
    """Returns the attention of each layer, as if each had its own keys and values."""
    bias = fields.flag("attention_bias", False)
    plain = replace(
        read_attention(fields, num_kv_heads=2, head_dim=256, bias=bias, output_bias=bias),
        scale=1.0,
        qk_norm="head",
        value_norm=True,
    )
    theta = fields.number("rope_local_base_freq", 10_000.0)
    ropes = {
        FULL: RopeConfig.from_fields(fields, positions, plain.head_dim, layer_type=FULL, theta=1e6),
        SLIDING: read_rope_of_windows(fields, positions, plain.head_dim, theta=theta),
    }
    windows = windows_by_type(fields, types, fields.integer("sliding_window", 512))
    return [
        replace(plain, window=window, rope=ropes[kind])
        for kind, window in zip(types, windows, strict=True)
    ]


def _read_mlps(fields: Fields, num_layers: int) -> list[MLPSpec]:
    widths: Any = fields.values["intermediate_size"]
    if not isinstance(widths, list):
        widths = [widths] * num_layers
    num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
    sparsities: Any = fields.values.get("activation_sparsity_pattern")
    if sparsities is None:
        sparsities = [_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    for name, values in (
        ("intermediate_size", widths),
        ("activation_sparsity_pattern", sparsities),
    ):
        if not isinstance(values, list) or len(values) != num_layers:
            raise fields.error(f"{name!r} must list a number for each of {num_layers} layers")
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return [
        MLPSpec(
            inner=Fields({"intermediate_size": width}, fields.where).integer("intermediate_size"),
            activation=activation,
            sparsity=_checked_sparsity(fields, sparsity),
        )
        for width, sparsity in zip(widths, sparsities, strict=True)
    ]


def _checked_sparsity(fields: Fields, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise fields.error(
            f"'activation_sparsity_pattern' must list numbers from 0 to below 1, not {value!r}"
        )
    return float(value)


def _read_altup(fields: Fields) -> AltUpSpec:
    """Returns the streams. ``altup_coef_clip`` limits coefficients in training alone."""
    count = fields.integer("altup_num_inputs", 4, maximum=MOST_STREAMS)
    active = fields.integer("altup_active_idx", 0, minimum=0, maximum=count - 1)
    scaled = fields.flag("altup_correct_scale", True)
    return AltUpSpec(num_streams=count, active=active, scaled=scaled)


def _unread_scales(num_layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.altup.correct_output_scale" for i in range(num_layers))


def _read_per_layer(fields: Fields) -> PerLayerSpec:
    """Returns the inputs of layers. Tokens behind the table have those of the first one."""
    return PerLayerSpec(
        vocab_size=fields.integer("vocab_size_per_layer_input", 262_144),
        width=fields.integer("hidden_size_per_layer_input", 256),
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
    )
