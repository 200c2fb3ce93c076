"""Jina Embeddings v3: XLM-RoBERTa with rotations in place of learned positions (Sturua et al.,
2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.bert import read_head, tanh_dense
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.readers import read_ungated_mlp
from shmllm.models.rotary_encoder import module_names, published_weights, read_rotary_encoder

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
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"layer_norm_eps": 1e-5})
    mlp = read_ungated_mlp(fields, activation="gelu", bias=True)
    positions = fields.integer("max_position_embeddings", 8194)
    return replace(
        read_rotary_encoder(fields, mlp, positions, theta=20_000.0, bias=True),
        head=read_head(fields, tanh_dense(fields, "classifier.dense"), "classifier.out_proj"),
        num_token_types=fields.integer("type_vocab_size", 1),
        skipped_prefixes=("pooler.", "lm_head."),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return published_weights(weights, _NAMES | _MLP, _QKV)


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names that transformers' modules have."""
    return module_names(weights, _MLP)
