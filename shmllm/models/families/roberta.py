"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions begin behind the padding token's id, and
whose classifier has its own projection of the first token (Liu et al., 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import named_weights, read_encoder, read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

__all__ = ["configure", "named_weights", "other_names"]

_JINA_NAMES = {
    "model.layers.": "encoder.layers.",
    "model.embed_tokens.": "embeddings.word_embeddings.",
    "model.embed_positions.": "embeddings.position_embeddings.",
    "model.embed_token_types.": "embeddings.token_type_embeddings.",
    "model.embed_norm.": "emb_ln.",
    ".self_attn.o_proj.": ".mixer.out_proj.",
    ".self_attn.": ".mixer.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
    ".attention.output.LayerNorm.": ".norm1.",
    ".output.LayerNorm.": ".norm2.",
}
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")


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


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names in the files of jina-reranker-v2."""
    from shmllm.models.fused_names import with_fused

    joint = with_fused(weights, _QKV)
    return {renamed(name, _JINA_NAMES): views for name, views in joint.items()}
