"""StarCoder 1 and SantaCoder (Allal et al., 2023): GPT-2 whose heads of queries share one key and
one value (Shazeer, 2019), with matrices as [out, in]."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.gpt2 import NAMES, QKV, configure_with
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("add_cross_attention", False):
        raise fields.error("add_cross_attention true is not supported")
    shares_keys = fields.flag("multi_query", True)
    model = configure_with(fields, num_kv_heads=1 if shares_keys else None)
    if fields.flag("scale_attn_weights", True):
        return model
    return replace(model, layers=tuple(map(_without_scale, model.layers)))


def _without_scale(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.mixer, AttentionSpec)
    return replace(layer, mixer=replace(layer.mixer, scale=1.0))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, QKV, config.attentions[0].num_kv_heads)
    return {renamed(name, NAMES): views for name, views in found.items()}
