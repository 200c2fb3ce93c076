"""ELECTRA: BERT without a pooler, whose classifier has its own projection of the first token (Clark
et al., 2020)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.bert import named_weights, read_encoder, read_head, tanh_dense
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    width, own = fields.integer("hidden_size", 256), fields.integer("embedding_size", 128)
    if own != width:
        raise fields.error(
            f"embedding_size {own} is not supported with a hidden_size of {width}; supported: the "
            "same"
        )
    dense = replace(tanh_dense(fields, "classifier.dense"), activation="gelu")
    return replace(
        read_encoder(fields),
        head=read_head(fields, dense, "classifier.out_proj"),
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=("generator_", "discriminator_predictions."),
    )
