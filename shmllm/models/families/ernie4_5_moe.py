"""ERNIE 4.5 with experts: a softmax chooses them, with a bias that counts for the choice alone. The
first layers have an MLP, and others may, too. What predicts further tokens is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.ernie4_5 import ernie_model, read_ernie_attention
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_experts, read_mlp, read_num_layers
from shmllm.models.specs import MLPSpec, MoESpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

SMALLEST_SHARE = 1e-12
"""The smallest sum of the chosen experts' scores that the kernels divide by."""
_BIAS = ".gate.e_score_correction_bias"


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_bias", False):  # the LM head has one, too
        raise fields.error("'use_bias' is not supported; supported: false")
    attention, experts = read_ernie_attention(fields, num_kv_heads=4), read_ernie_experts(fields)
    layers = [
        LayerSpec(mixer=attention, mlp=experts if has_experts else read_mlp(fields))
        for has_experts in _layers_with_experts(fields)
    ]
    return replace(ernie_model(fields, layers), skipped_prefixes=("model.mtp_",))


def read_ernie_experts(fields: Fields) -> MoESpec:
    """Returns the experts of a layer, whose width is ``moe_intermediate_size``."""
    least = fields.number("moe_norm_min", SMALLEST_SHARE)
    if least != SMALLEST_SHARE:
        raise fields.error(
            f"moe_norm_min {least:g} is not supported; supported: {SMALLEST_SHARE:g}"
        )
    inner = fields.integer("moe_intermediate_size", 1536)
    num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    named = fields.under_names(
        {"num_experts": ("moe_num_experts", 64), "num_experts_per_tok": ("moe_k", 6)}
    )
    return replace(
        read_experts(named, inner, num_experts=64, top_k=6),
        renormalize=True,
        correction_bias=True,
        router_float32=True,
        shared=MLPSpec(inner=inner * num_shared) if num_shared else None,
        shared_name="shared_experts",
    )


def _layers_with_experts(fields: Fields) -> list[bool]:
    """Returns for each layer whether it has experts."""
    num_layers = read_num_layers(fields)
    interval = fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = num_layers - 1 if last == -1 else last
    return [(i + 1) % interval == 0 and first <= i <= last for i in range(num_layers)]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return _renamed(weights, ".moe_statics.e_score_correction_bias")


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return _renamed(weights, ".gate.moe_statics.e_score_correction_bias")


def _renamed(weights: NamedWeights, bias: str) -> NamedWeights:
    """Returns the destinations with the routers' biases under another end of their names, where
    they have one row."""
    from torch import Tensor

    found: NamedWeights = {}
    for name, views in weights.items():
        if name.endswith(_BIAS):
            assert isinstance(views[0], Tensor), "biases are not quantized"
            found[name.removesuffix(_BIAS) + bias] = (views[0][None],)
        else:
            found[name] = views
    return found
