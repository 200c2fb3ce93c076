"""DistilBERT: BERT without types of tokens and without a pooler, under names of its own (Sanh et
al., 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import mlm_head, read_encoder, read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.readers import read_activation
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("dim", 768),
    "num_attention_heads": ("n_heads", 12),
    "num_hidden_layers": ("n_layers", 6),
    "intermediate_size": ("hidden_dim", 4 * 768),
    "hidden_act": ("activation", "gelu"),
}
"""DistilBERT's name and default of each field that `bert.read_encoder` reads."""

_NAMES = {
    "model.layers.": "transformer.layer.",
    "model.embed_tokens.": "embeddings.word_embeddings.",
    "model.embed_positions.": "embeddings.position_embeddings.",
    "model.embed_norm.": "embeddings.LayerNorm.",
    ".self_attn.q_proj.": ".attention.q_lin.",
    ".self_attn.k_proj.": ".attention.k_lin.",
    ".self_attn.v_proj.": ".attention.v_lin.",
    ".self_attn.o_proj.": ".attention.out_lin.",
    ".mlp.up_proj.": ".ffn.lin1.",
    ".mlp.down_proj.": ".ffn.lin2.",
    ".attention.output.LayerNorm.": ".sa_layer_norm.",
    ".output.LayerNorm.": ".output_layer_norm.",
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.under_names(_FIELDS)
    fixed = {"layer_norm_eps": 1e-12}  # not a field of DistilBERT's
    fields = Fields(fields.values | fixed, fields.where)
    dense = replace(tanh_dense(fields, "pre_classifier"), activation="relu")
    return replace(
        read_encoder(fields), head=read_head(fields, dense), skipped_prefixes=("vocab_",)
    )


def with_mlm_head(model: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the configuration with the head that predicts masked tokens."""
    names = "vocab_transform", "vocab_layer_norm"
    activation = read_activation(fields, "activation", "gelu")
    head = mlm_head(model, fields, names, activation, "vocab_projector")
    return replace(model, head=head, skipped_prefixes=("vocab_projector.weight",))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
