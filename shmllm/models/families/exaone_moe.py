"""K-EXAONE: EXAONE 4's attention, with norms before it and the MLP; DeepSeek-V3's experts in most
layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import read_sigmoid_experts
from shmllm.models.families.exaone4 import POSITIONS, read_mixers
from shmllm.models.families.olmo2 import olmo_model
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    SPARSE,
    read_mlp,
    read_mlp_types,
    read_num_layers,
    read_positions,
)

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights


def configure(fields: Fields) -> ModelConfig:
    named = fields.under_names(
        {"n_routed_experts": ("num_experts", 64), "n_shared_experts": ("num_shared_experts", 1)}
    )
    experts = read_sigmoid_experts(named, inner=1024, num_experts=64, weight_scale=2.5)
    layers = [
        LayerSpec(mixer=mixer, mlp=experts if has_experts else read_mlp(fields))
        for mixer, has_experts in zip(
            read_mixers(fields), _layers_with_experts(fields), strict=True
        )
    ]
    return olmo_model(fields, layers, read_positions(fields, POSITIONS))


def _layers_with_experts(fields: Fields) -> list[bool]:
    """Returns for each layer whether it has experts."""
    num_layers = read_num_layers(fields)
    types = read_mlp_types(fields, num_layers)
    if types is None:
        first = fields.integer("first_last_k_dense_replace", 1, minimum=0)  # of the first files
        num_dense = fields.integer("first_k_dense_replace", first, minimum=0)
        return [index >= num_dense for index in range(num_layers)]
    return [kind == SPARSE for kind in types]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {
        name.replace(".mlp.gate.e_score", ".mlp.e_score"): views for name, views in weights.items()
    }
