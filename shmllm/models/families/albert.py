"""ALBERT: BERT with narrow embeddings, which are projected, and layers that share their weights
(Lan et al., 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import read_encoder, read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_000,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 12,
    "intermediate_size": 16_384,
    "hidden_act": "gelu_new",
}

_NORMS = LayerNorms(
    after_mixer="attention.LayerNorm", after_mlp="full_layer_layer_norm", of_sums=True
)

_NAMES = {
    "model.embed_tokens.": "embeddings.word_embeddings.",
    "model.embed_positions.": "embeddings.position_embeddings.",
    "model.embed_token_types.": "embeddings.token_type_embeddings.",
    "model.embed_norm.": "embeddings.LayerNorm.",
    "model.embed_projection.": "encoder.embedding_hidden_mapping_in.",
    ".self_attn.q_proj.": ".attention.query.",
    ".self_attn.k_proj.": ".attention.key.",
    ".self_attn.v_proj.": ".attention.value.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.up_proj.": ".ffn.",
    ".mlp.down_proj.": ".ffn_output.",
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    if (inner := fields.integer("inner_group_num", 1)) != 1:
        raise fields.error(f"inner_group_num {inner} is not supported; supported: 1")
    model, groups = read_encoder(fields), fields.integer("num_hidden_groups", 1)
    count = model.num_layers
    if groups > count:
        raise fields.error(f"num_hidden_groups {groups} exceeds num_hidden_layers {count}")
    of_layers = [int(index / (count / groups)) for index in range(count)]
    head = read_head(fields, tanh_dense(fields, "pooler"))
    return replace(
        model,
        layers=tuple(replace(layer, norms=_NORMS) for layer in model.layers),
        weights_of=tuple(of_layers.index(group) for group in of_layers),
        embedding_size=fields.integer("embedding_size", 128),
        head=head,
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=("predictions.", "sop_classifier.", *(() if head else ("pooler.",))),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    groups = {source: group for group, source in enumerate(dict.fromkeys(config.weights_of))}
    names = {
        f"model.layers.{index}.": f"encoder.albert_layer_groups.{groups[source]}.albert_layers.0."
        for index, source in enumerate(config.weights_of)
    }
    return {renamed(name, names | _NAMES): views for name, views in weights.items()}
