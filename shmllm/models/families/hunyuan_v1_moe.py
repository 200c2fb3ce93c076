"""Hunyuan 1 with experts in all layers, beside an MLP that every token goes to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.hunyuan_v1_dense import hunyuan_model, read_hunyuan_attention
from shmllm.models.families.hunyuan_v1_dense import named_weights as dense_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_experts, read_mlp, read_num_layers
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ROUTER = {".mlp.gate.": ".mlp.gate.wg."}
_COUNTS = {"num_experts": "num_experts", "num_experts_per_tok": "moe_topk"}
"""The names under which a checkpoint has numbers that may differ by layer."""


def configure(fields: Fields) -> ModelConfig:
    attention = read_hunyuan_attention(fields)
    layers = [
        LayerSpec(mixer=attention, mlp=_read_experts(fields, index))
        for index in range(read_num_layers(fields))
    ]
    return hunyuan_model(fields, layers)


def _read_experts(fields: Fields, layer: int) -> MoESpec:
    shared = read_mlp(fields)
    counts = {ours: _of_layer(fields, name, layer) for ours, name in _COUNTS.items()}
    inner = _of_layer(fields, "moe_intermediate_size", layer)
    if inner not in (None, shared.inner):
        raise fields.error(
            f"moe_intermediate_size {inner!r} is not supported; supported: that of "
            f"intermediate_size, {shared.inner}, which transformers takes"
        )
    num_shared = _of_layer(fields, "num_shared_expert", layer)
    if num_shared not in (None, 1):
        raise fields.error(f"num_shared_expert {num_shared!r} is not supported; supported: 1")
    experts = read_experts(
        fields.with_values(fields.values | counts), shared.inner, num_experts=1, top_k=1
    )
    return replace(
        experts, renormalize=True, router_float32=True, shared=shared, shared_name="shared_mlp"
    )


def _of_layer(fields: Fields, name: str, layer: int) -> Any:
    """Returns a field's value in a layer; a list has a value for each layer."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return value
    if layer >= len(value):
        raise fields.error(f"{name!r} lists {len(value)} layers, fewer than the model has")
    return value[layer]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    weights = dense_weights(weights, config)
    return {renamed(name, _ROUTER): views for name, views in weights.items()}


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _ROUTER): views for name, views in weights.items()}
