"""BART: an encoder of texts, and a decoder that attends to its results. Norms are behind the
additions, and positions are learned (Lewis et al., 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.encoder_decoder import (
    name_of_pair,
    pairs_of_layers,
    rows_from,
    text_begins,
)
from shmllm.models.families.bert import read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.readers import MOST_LAYERS, read_activation, read_attention, read_model
from shmllm.models.sinusoid_kinds import SinusoidKind
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.text.specs import BartTower, TextSpec, activation_of
from shmllm.models.vision.fields import read_num_heads
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_SELF, _CROSS, _MLP = "self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"
_PRE_NORMS = (
    LayerNorms(before_mixer=_SELF),
    LayerNorms(before_mixer=_CROSS, before_mlp=_MLP),
)
_POST_NORMS = (
    LayerNorms(after_mixer=_SELF, of_sums=True),
    LayerNorms(after_mixer=_CROSS, after_mlp=_MLP, of_sums=True),
)
_EPS = 1e-5
_DENSE, _CLASSIFIER = "classification_head.dense", "classification_head.out_proj"
FIRST_POSITION = 2
"""The row of a table of positions for the first token."""
_NAMES = {
    "model.embed_tokens.": "model.shared.",
    "model.layers.": "model.decoder.layers.",
    "model.norm.": "model.decoder.layer_norm.",
    "model.embed_norm.": "model.decoder.layernorm_embedding.",
    "model.embed_positions.": "model.decoder.embed_positions.",
    "lm_head.bias": "final_logits_bias",
    ".o_proj.": ".out_proj.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
}
_SHARED = ("model.decoder.embed_tokens.", "model.encoder.embed_tokens.")
"""Other names of the embeddings of tokens."""
_COMPUTED = ("model.decoder.embed_positions.", "model.encoder.embed_positions.")
"""Sinusoids, which some files have."""
_POSITIONS = "model.decoder.embed_positions.weight"


@dataclass(frozen=True, slots=True)
class BartKind:
    """What differs between BART and the families after it.

    Attributes:
        is_pre_norm: whether norms are before attention and MLP.
        embedding_norm: whether embeddings have a norm.
        sinusoids: which sinusoids embed positions; None: a checkpoint has the embeddings.
        first_position: the row of the table of positions for the first token.
        has_bias: whether logits have a bias, which a checkpoint may lack.
        activation: the default of ``activation_function``.
        vocab_size: the default of ``vocab_size``.
        scales: the default of ``scale_embedding``.
        decoder_start: the default of ``decoder_start_token_id``.
    """

    is_pre_norm: bool = False
    embedding_norm: bool = True
    sinusoids: SinusoidKind | None = None
    first_position: int = FIRST_POSITION
    has_bias: bool = True
    activation: str = "gelu"
    vocab_size: int = 50265
    scales: bool = False
    decoder_start: int | None = 2


def configure(fields: Fields) -> ModelConfig:
    model = configure_kind(fields, BartKind())
    fields = fields.with_values(fields.values | {"hidden_size": model.hidden_size})
    head = read_head(fields, tanh_dense(fields, _DENSE), _CLASSIFIER)
    if head is None:
        return model
    return replace(model, head=head, lm_head_bias=False)


def configure_kind(fields: Fields, kind: BartKind) -> ModelConfig:
    """Returns the configuration of a model of BART's kind.

    Args:
        fields: the fields of config.json.
        kind: what differs from BART.
    """
    width = fields.integer("d_model", 1024)
    own: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": fields.integer("decoder_attention_heads", 16),
        "num_key_value_heads": None,
        "head_dim": None,
    }
    defaults = {"vocab_size": kind.vocab_size, "activation_function": kind.activation}
    fields = fields.with_defaults(defaults).with_values(fields.values | own)
    scale = math.sqrt(width) if fields.flag("scale_embedding", kind.scales) else 1.0
    positions = fields.integer("max_position_embeddings", 1024)
    num_layers = fields.integer("decoder_layers", 12, maximum=MOST_LAYERS)
    attention = read_attention(fields, bias=True, output_bias=True)
    mlp = MLPSpec(
        inner=fields.integer("decoder_ffn_dim", 4096),
        activation=read_activation(fields, "activation_function"),
        gated=False,
        bias=True,
    )
    num_heads = read_num_heads(fields, "encoder_attention_heads", 16, width, "d_model")
    tower = BartTower(
        hidden_size=width,
        num_layers=fields.integer("encoder_layers", 12, maximum=MOST_LAYERS),
        num_heads=num_heads,
        head_dim=width // num_heads,
        inner=fields.integer("encoder_ffn_dim", 4096),
        activation=activation_of(fields, mlp),
        most_tokens=positions,
        embedding_scale=scale,
        num_decoder_layers=num_layers,
        kv_width=width,
        is_pre_norm=kind.is_pre_norm,
        embedding_norm=kind.embedding_norm,
        sinusoids=kind.sinusoids,
        first_position=kind.first_position,
    )
    norms, begin = _PRE_NORMS if kind.is_pre_norm else _POST_NORMS, text_begins(positions)
    before = 0 if kind.sinusoids is None else kind.first_position
    layers = pairs_of_layers(attention, attention, mlp, norms, begin, num_layers)
    return replace(
        read_model(fields, layers, begin + positions, tied=True),
        norm=NormSpec(kind="layer", eps=_EPS, bias=True),
        embedding_scale=scale,
        embedding_norm=kind.embedding_norm,
        final_norm=kind.is_pre_norm,
        num_learned_positions=begin + positions + before,
        sinusoids=kind.sinusoids,
        first_position=before,
        lm_head_bias=kind.has_bias,
        zeros_if_absent=("final_logits_bias",) if kind.has_bias else (),
        skipped_prefixes=_SHARED if kind.sinusoids is None else (*_SHARED, *_COMPUTED),
        text=TextSpec(tower, kind.decoder_start),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from torch import Tensor

    parts = "self_attn.", "encoder_attn."
    named = {renamed(name_of_pair(name, parts), _NAMES): views for name, views in weights.items()}
    if config.sinusoids is None:  # the rows before the first token's have no meaning
        first = config.num_encoded - FIRST_POSITION
        named[_POSITIONS] = rows_from(named[_POSITIONS], first)
    if config.lm_head_bias:
        (bias,) = named["final_logits_bias"]
        assert isinstance(bias, Tensor), "it is no matrix"
        named["final_logits_bias"] = (bias[None],)
    return named
