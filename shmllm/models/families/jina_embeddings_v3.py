"""Jina Embeddings v3: XLM-RoBERTa with rotations in place of learned positions (Sturua et al.,
2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig, Pooled
from shmllm.models.families.bert import read_head, tanh_dense
from shmllm.models.families.rotary_encoder import (
    module_names,
    published_weights,
    read_rotary_encoder,
)
from shmllm.models.fields import Fields
from shmllm.models.readers import read_ungated_mlp
from shmllm.models.task_adapters import read_task_adapters

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_MLP = {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."}
_NAMES = {
    "model.layers.": "encoder.layers.",
    "embeddings.LayerNorm.": "emb_ln.",
    ".self_attn.o_proj.": ".mixer.out_proj.",
    ".self_attn.": ".mixer.",
    ".post_attention_layernorm.": ".norm1.",
    ".post_mlp_layernorm.": ".norm2.",
}
_POOLINGS: dict[str, Pooled] = {"cls": "CLS", "mean": "MEAN"}
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    is_published = fields.values.get("position_embedding_type") == "rotary"
    fields = _published(fields) if is_published else fields.with_defaults({"layer_norm_eps": 1e-5})
    mlp = read_ungated_mlp(fields, activation="gelu", bias=True)
    positions = fields.integer("max_position_embeddings", 8194)
    model = read_rotary_encoder(fields, mlp, positions, theta=20_000.0, bias=True)
    return replace(
        model,
        head=read_head(fields, tanh_dense(fields, "classifier.dense"), "classifier.out_proj"),
        num_token_types=fields.integer("type_vocab_size", 1),
        pooling=fields.meaning("emb_pooler", _POOLINGS, "cls") if is_published else model.pooling,
        skipped_prefixes=("pooler.", "lm_head."),
        task_adapters=read_task_adapters(fields),
    )


def _published(fields: Fields) -> Fields:
    """Returns the fields of the authors' files, in which they may not be absent, under
    transformers' names."""
    if (width := fields.values.get("truncate_dim")) is not None:
        raise fields.error(f"truncate_dim {width!r} is not supported; supported: None")
    for name in ("layer_norm_eps", "rotary_emb_base"):
        fields.number(name)
    for name in ("max_position_embeddings", "type_vocab_size"):
        fields.integer(name)
    return fields.under_names({"rope_theta": ("rotary_emb_base", None)})


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return published_weights(weights, _NAMES | _MLP, _QKV)


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names that transformers' modules have."""
    return module_names(weights, _MLP)
