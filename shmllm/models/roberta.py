"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions begin behind the padding token's id, and
whose classifier has its own projection of the first token (Liu et al., 2019)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.bert import named_weights, read_encoder, read_head, tanh_dense
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    model = read_encoder(fields)
    first = fields.integer("pad_token_id", 1, minimum=0) + 1
    if first >= model.num_learned_positions:
        raise fields.error(
            f"max_position_embeddings ({model.num_learned_positions}) must exceed pad_token_id + 1 "
            f"({first}), the position of the first token"
        )
    return replace(
        model,
        head=read_head(fields, tanh_dense(fields, "classifier.dense"), "classifier.out_proj"),
        num_token_types=fields.integer("type_vocab_size", 2),
        first_position=first,
        max_position_embeddings=model.num_learned_positions - first,
        skipped_prefixes=("pooler.", "lm_head."),
    )
