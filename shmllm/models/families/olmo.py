"""OLMo 1: Llama with LayerNorms that have neither weights nor biases; some models bound queries,
keys and values."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.specs import NormSpec

_NORM = NormSpec(kind="layer", eps=1e-5, weight=False)


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_values(fields.values | {"mlp_bias": False})  # OLMo has no such field
    model, clip = configure_llama(fields), fields.optional_number("clip_qkv")
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mixer, AttentionSpec), "it is Llama"
        layers.append(replace(layer, mixer=replace(layer.mixer, clip=clip)))
    return replace(model, norm=_NORM, layers=tuple(layers))
