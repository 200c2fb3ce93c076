"""MiniMax M2: experts chosen by sigmoids in all layers; queries and keys have norms over all heads,
and a part of each head rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.families.mixtral import named_weights as mixtral_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    MOST_LAYERS,
    read_attention,
    read_experts,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, str | int | None] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "sliding_window": None,
}
"""What fields of published models say that transformers does not read."""
_NAMES = {".mlp.gate.e_score": ".mlp.e_score"}


def configure(fields: Fields) -> ModelConfig:
    _check(fields)
    positions = read_positions(fields, 196_608)
    attention = read_attention(fields, num_kv_heads=8, head_dim=128)
    rotary_dim = fields.integer("rotary_dim", attention.head_dim)
    rope = RopeConfig.from_fields(
        fields,
        positions,
        attention.head_dim,
        theta=5e6,
        partial=rotary_dim / attention.head_dim,
    )
    attention = replace(attention, rope=rope, qk_norm="row")
    inner = fields.integer("intermediate_size", 1536)
    experts = replace(
        read_experts(fields, inner, num_experts=256, top_k=8),
        scoring="sigmoid",
        renormalize=True,
        correction_bias=True,
        router_float32=True,
    )
    layers = [LayerSpec(mixer=attention, mlp=experts)] * read_num_layers(fields)
    model = read_model(fields, layers, positions)
    return replace(model, skipped_prefixes=_further_layers(fields, len(layers)))


def _further_layers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the prefixes of the layers that predict further tokens, which transformers leaves
    out."""
    count = fields.integer("num_mtp_modules", 0, minimum=0, maximum=MOST_LAYERS)
    return tuple(f"model.layers.{num_layers + index}." for index in range(count))


def _check(fields: Fields) -> None:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    types = fields.values.get("attn_type_list") or []
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise fields.error("'attn_type_list' is not supported but for layers of type 1")


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return mixtral_weights(module_weights(weights, config), config)


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
