"""MPNet: RoBERTa whose attention adds a bias for the distance between two tokens, which all layers
share (Song et al., 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, DistanceBiases
from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import read_encoder, read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIRST_POSITION = 2
"""The row of the position table for the first token, whatever the padding token."""

_BUCKETS = 32
_BIASES = "encoder.relative_attention_bias.weight"

_NAMES = {
    "model.layers.": "encoder.layer.",
    "model.embed_tokens.": "embeddings.word_embeddings.",
    "model.embed_positions.": "embeddings.position_embeddings.",
    "model.embed_norm.": "embeddings.LayerNorm.",
    ".attention.output.LayerNorm.": ".attention.LayerNorm.",
    ".mlp.up_proj.": ".intermediate.dense.",
    ".mlp.down_proj.": ".output.dense.",
    **{f".self_attn.{each}_proj.": f".attention.attn.{each}." for each in "qkvo"},
}


def configure(fields: Fields) -> ModelConfig:
    buckets = fields.integer("relative_attention_num_buckets", _BUCKETS)
    if buckets != _BUCKETS:  # transformers counts so many, whatever the field says
        raise fields.error(
            f"relative_attention_num_buckets {buckets} is not supported; supported: {_BUCKETS}"
        )
    fields.integer("max_position_embeddings", 512, maximum=MOST_BIASED_POSITIONS)
    model = read_encoder(fields)
    positions = model.num_learned_positions - _FIRST_POSITION
    if positions < 1:
        raise fields.error(f"max_position_embeddings must exceed {_FIRST_POSITION}")
    (attention,) = set(model.attentions)
    attention = replace(attention, biases=DistanceBiases(positions, buckets))
    return replace(
        model.with_mixers(lambda _: attention),
        head=read_head(fields, tanh_dense(fields, "classifier.dense"), "classifier.out_proj"),
        first_position=_FIRST_POSITION,
        max_position_embeddings=positions,
        skipped_prefixes=("pooler.", "lm_head."),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_shared

    own = {renamed(name, _NAMES): views for name, views in weights.items()}
    return with_shared(own, ".relative_attention_bias.", _BIASES)
