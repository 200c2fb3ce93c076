"""Flint: Qwen 3 MoE with sinks, experts weighted by sigmoids, and an MLP that all tokens
go to; layers with a window rotate, others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.exaone4 import read_mixers
from shmllm.models.families.qwen2_moe import read_experts_and_shared, with_dense_mlps
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import FULL, SLIDING, read_model, read_num_layers, read_positions
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 513,
    "mlp_only_layers": [0, 1],
}
_NAMES = {".self_attn.sinks": ".self_attn.softmax_offset"}


def configure(fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    fields = fields.with_defaults(_DEFAULTS | {"layer_types": _default_types(num_layers)})
    bias = fields.flag("attention_bias", False)
    experts = replace(
        read_experts_and_shared(
            fields,
            inner=512,
            shared_inner=1024,
            num_experts=256,
            top_k=6,
            renormalize=fields.flag("norm_topk_prob", True),
        ),
        scoring="sigmoid",
        total_eps=0.0,
        router_float32=True,
        shared_gate=False,
    )
    layers = [
        LayerSpec(mixer=replace(each, sinks=True, bias=bias, output_bias=bias), mlp=experts)
        for each in read_mixers(fields)
    ]
    return read_model(fields, with_dense_mlps(fields, layers), read_positions(fields, 262_144))


def _default_types(num_layers: int) -> list[str]:
    """Returns the types of layers: the first two, every fourth one and the last are full."""
    full = {0, num_layers - 1, *range(1, num_layers, 4)}
    return [FULL if index in full else SLIDING for index in range(num_layers)]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations that transformers' modules name otherwise."""
    return {name: views for name, views in weights.items() if renamed(name, _NAMES) != name}
