"""Orion 14B (OrionStar, 2024): Llama with LayerNorms."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.specs import NormSpec


def configure(fields: Fields) -> ModelConfig:
    model = configure_llama(fields.with_absent({"max_position_embeddings": 4096}))
    eps = fields.number("rms_norm_eps", 1e-5)
    return replace(model, norm=NormSpec(kind="layer", eps=eps, bias=True))
