"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions begin behind the padding token's id, and
whose classifier has its own projection of the first token (Liu et al., 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.bert import named_weights as bert_names
from shmllm.models.bert import pooled_dense, read_encoder, with_labels
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.head_specs import HeadSpec
from shmllm.models.registry import Purpose, purpose_of

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights


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
        head=_head(fields),
        num_token_types=fields.integer("type_vocab_size", 2),
        first_position=first,
        max_position_embeddings=model.num_learned_positions - first,
        skipped_prefixes=("pooler.", "lm_head."),
    )


def _head(fields: Fields) -> HeadSpec | None:
    match purpose_of(str(fields.values["architectures"][0])):
        case Purpose.CLASSIFY:
            dense = pooled_dense(fields, "classifier.dense")
            return with_labels(fields, dense, name="classifier.out_proj")
        case Purpose.CLASSIFY_TOKENS:
            return with_labels(fields)
    return None


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return bert_names(weights, config)
