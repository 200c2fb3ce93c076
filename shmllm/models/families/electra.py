"""ELECTRA: BERT without a pooler, whose classifier has its own projection of the first token. Small
models project narrow embeddings (Clark et al., 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import bert
from shmllm.models.families.bert import read_encoder, read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}

_PROJECTION = {"model.embed_projection.": "embeddings_project."}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    own = fields.integer("embedding_size", 128)
    dense = replace(tanh_dense(fields, "classifier.dense"), activation="gelu")
    return replace(
        read_encoder(fields),
        head=read_head(fields, dense, "classifier.out_proj"),
        embedding_size=None if own == fields.integer("hidden_size") else own,
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=("generator_", "discriminator_predictions."),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    own = {renamed(name, _PROJECTION): views for name, views in weights.items()}
    return bert.named_weights(own, config)
