"""Granite 4: layers of Mamba 2, and some of attention with or without rotation; an MLP, or experts
beside one that all tokens go to; the factors of Granite."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.granite import with_factors
from shmllm.models.families.granite_moe import module_weights, named_weights, read_granite_experts
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mamba_fields import HYBRID_MAMBA2, LINEAR, read_mamba2
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.readers import (
    FULL,
    read_activation,
    read_attention,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import MLPSpec

__all__ = ["configure", "module_weights", "named_weights"]

_OLD_TYPES = {"mamba": LINEAR, "attention": FULL}
"""What the names of types of layers in the model's first files mean."""


def configure(fields: Fields) -> ModelConfig:
    num_layers, positions = read_num_layers(fields), read_positions(fields, 2048)
    types, mlp = _read_types(fields, num_layers), _read_feed_forward(fields)
    kinds: dict[str, MixerSpec] = {}
    if FULL in types:
        kinds[FULL] = _read_attention(fields, positions)
    if LINEAR in types:
        kinds[LINEAR] = read_mamba2(fields.null_as_false("mamba_conv_bias"), HYBRID_MAMBA2)
    layers = [LayerSpec(mixer=kinds[name], mlp=mlp) for name in types]
    return with_factors(fields, read_model(fields, layers, positions))


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns ``layer_types``, or ``layers_block_type``, as they were called at first."""
    name = "layer_types" if fields.values.get("layer_types") is not None else "layers_block_type"
    found = fields.values.get(name)
    if isinstance(found, list):
        found = [_OLD_TYPES.get(each, each) if isinstance(each, str) else each for each in found]
    known = Fields({"layer_types": found}, fields.where)
    return read_layer_types(known, num_layers, (LINEAR, FULL)) or (LINEAR,) * num_layers


def _read_attention(fields: Fields, positions: int) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    kind = fields.values.get("position_embedding_type")
    if kind == "rope":
        return with_rope(attention, fields, positions)
    if kind not in (None, "nope"):
        raise fields.error(f"position_embedding_type {kind!r} is not supported; supported: rope")
    return attention


def _read_feed_forward(fields: Fields) -> FeedForwardSpec:
    shared = MLPSpec(
        inner=fields.integer("shared_intermediate_size", 1024), activation=read_activation(fields)
    )
    if fields.integer("num_local_experts", 8, minimum=0) == 0:
        return shared
    return replace(read_granite_experts(fields), shared=shared)
