"""ModernBERT: tokens attend to all of their text, in most layers to those near them; norms before
attention and MLP, rotations, gated MLPs (Warner et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig, Pooled
from shmllm.models.config_file import architecture_name
from shmllm.models.families.bert import with_labels
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadNormSpec, HeadSpec
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_activation,
    read_attention,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.registry import Purpose, purpose_of
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

NORMS = LayerNorms(before_mixer="attn_norm", before_mlp="mlp_norm")
FIRST_NORMS = replace(NORMS, before_mixer=None)
"""The norms of the first layer, whose attention reads the normalised embeddings."""

_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""The names and the defaults of the fields that older files have for the bases of wavelengths."""

_POOLINGS: dict[str, Pooled] = {"cls": "CLS", "mean": "MEAN"}

NAMES = {
    "model.embed_tokens.": "model.embeddings.tok_embeddings.",
    "model.embed_norm.": "model.embeddings.norm.",
    "model.norm.": "model.final_norm.",
    ".self_attn.o_proj.": ".attn.Wo.",
    ".self_attn.": ".attn.",
    ".mlp.down_proj.": ".mlp.Wo.",
}
"""The parts of names that differ from the default ones."""
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")
GATE_UP = "Wi", ("gate_proj", "up_proj")


def configure(fields: Fields) -> ModelConfig:
    head = _head(fields)
    return replace(
        configure_layers(fields),
        head=head,
        pooling="CLS" if head is None else fields.meaning("classifier_pooling", _POOLINGS, "cls"),
        skipped_prefixes=("head.", "decoder.") if head is None else (),
    )


def configure_layers(fields: Fields) -> ModelConfig:
    """Returns the embeddings and the layers, whose tokens attend both ways."""
    plain = {"num_key_value_heads": None, "head_dim": None}  # ModernBERT has no such fields
    fields = Fields(fields.values | plain, fields.where)
    positions = read_positions(fields, 8192)
    attentions = {kind: _attention(fields, kind, positions) for kind in (FULL, SLIDING)}
    mlp = MLPSpec(
        inner=fields.integer("intermediate_size", 1152),
        activation=read_activation(fields, "hidden_activation", "gelu"),
        bias=fields.flag("mlp_bias", False),
    )
    layers = [
        LayerSpec(mixer=attentions[kind], mlp=mlp, norms=NORMS if index else FIRST_NORMS)
        for index, kind in enumerate(_layer_types(fields))
    ]
    return replace(
        read_model(fields, layers, positions, tied=True), norm=_norm(fields), embedding_norm=True
    )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    num_layers = read_num_layers(fields)
    every = fields.integer("global_attn_every_n_layers", 3)
    types = read_layer_types(fields, num_layers)
    return types or tuple(SLIDING if index % every else FULL for index in range(num_layers))


def _attention(fields: Fields, kind: str, positions: int) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    name, default = _THETAS[kind]
    rope = RopeConfig.from_fields(
        fields,
        positions,
        attention.head_dim,
        layer_type=kind,
        theta=fields.number(name, default),
    )
    if kind == FULL:
        return replace(attention, rope=rope, ahead=None)
    ahead = fields.integer("local_attention", 128) // 2
    return replace(attention, rope=rope, ahead=ahead, window=ahead + 1)


def _norm(fields: Fields) -> NormSpec:
    bias = fields.flag("norm_bias", False)
    return NormSpec(kind="layer", eps=fields.number("norm_eps", 1e-5), bias=bias)


def _head(fields: Fields) -> HeadSpec | None:
    """Returns what classifies texts or tokens: a projection and a norm before the classifier."""
    purpose = purpose_of(architecture_name(fields))
    if purpose not in (Purpose.CLASSIFY, Purpose.CLASSIFY_TOKENS):
        return None
    activation = read_activation(fields, "classifier_activation", "gelu")
    if activation == "relu_squared":
        raise fields.error("classifier_activation 'relu2' is not supported")
    width = fields.integer("hidden_size")
    dense = DenseSpec(
        name="head.dense",
        inputs=width,
        outputs=width,
        bias=fields.flag("classifier_bias", False),
        activation=activation,
    )
    return with_labels(
        fields, dense, HeadNormSpec(name="head.norm", width=width, norm=_norm(fields))
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused

    fused = with_fused(weights, _QKV, GATE_UP)
    return {renamed(name, NAMES): views for name, views in fused.items()}
