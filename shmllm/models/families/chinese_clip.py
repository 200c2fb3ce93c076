"""Chinese-CLIP: CLIP whose encoder of texts is BERT, of which the first token is projected (Yang et
al., 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import bert
from shmllm.models.families.clip import first_fields, read_vision, with_projections
from shmllm.models.fields import Fields

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

__all__ = ["configure", "named_weights", "read_vision"]

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}


def configure(fields: Fields) -> ModelConfig:
    fields = first_fields(fields).with_defaults(_DEFAULTS)
    model = with_projections(bert.read_encoder(fields), fields)
    return replace(
        model,
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=(*model.skipped_prefixes, "model.pooler."),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    own = bert.named_weights(weights, config)
    return {f"model.{name}": views for name, views in own.items()}
