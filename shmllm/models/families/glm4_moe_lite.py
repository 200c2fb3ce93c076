"""GLM-4.7-Flash: latent attention and DeepSeek-V3's experts, in layers that a field lists."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    read_latent_attention,
    read_sigmoid_experts,
    with_further_layers,
)
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    DENSE,
    SPARSE,
    read_mlp,
    read_mlp_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.specs import MLPSpec, MoESpec


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 202_752)
    attention = read_latent_attention(
        fields,
        positions,
        interleaved=fields.flag("rope_interleave", True),
        query_rank=768,
        nope_dim=192,
        value_dim=256,
    )
    experts = read_sigmoid_experts(fields, inner=1536, num_experts=64, top_k=4, weight_scale=1.8)
    kinds: dict[str, MLPSpec | MoESpec] = {DENSE: read_mlp(fields), SPARSE: experts}
    layers = [LayerSpec(mixer=attention, mlp=kinds[kind]) for kind in _mlp_types(fields)]
    model = with_further_layers(read_model(fields, layers, positions), fields, experts)
    return replace(model, norm=read_norm(fields, default=1e-5))


def _mlp_types(fields: Fields) -> tuple[str, ...]:
    """Returns DENSE or SPARSE for each layer; by default the first one is dense."""
    num_layers = read_num_layers(fields)
    return read_mlp_types(fields, num_layers) or (DENSE,) + (SPARSE,) * (num_layers - 1)
