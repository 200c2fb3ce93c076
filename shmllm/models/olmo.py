"""OLMo 1: Llama with LayerNorms that have neither weights nor biases."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.llama import configure as configure_llama
from shmllm.models.specs import NormSpec

_NORM = NormSpec(kind="layer", eps=1e-5, weight=False)


def configure(fields: Fields) -> ModelConfig:
    if fields.optional_number("clip_qkv") is not None:
        raise fields.error("clip_qkv is not supported")
    fields = fields.with_values(fields.values | {"mlp_bias": False})  # OLMo has no such field
    return replace(configure_llama(fields), norm=_NORM)
