"""Granite: Llama with factors of embeddings, attention scores, residual additions and logits."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec


def configure(fields: Fields) -> ModelConfig:
    return with_factors(fields, configure_llama(fields))


def with_factors(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Returns the model with the factors of the fields."""
    scale = fields.number("attention_multiplier", 1.0)
    embedding_scale = fields.number("embedding_multiplier", 1.0)

    def scaled(mixer: MixerSpec) -> MixerSpec:
        return replace(mixer, scale=scale) if isinstance(mixer, AttentionSpec) else mixer

    return replace(
        model,
        layers=tuple(layer.with_mixers(scaled) for layer in model.layers),
        embedding_scale=embedding_scale,
        embeds_scale=embedding_scale,
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )
