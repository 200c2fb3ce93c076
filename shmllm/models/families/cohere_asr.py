"""Cohere Transcribe, which writes what a sound says: Parakeet's encoder, and a decoder with learned
positions and a norm of its embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.formats.audio_settings import MOST_PARAKEET_FRAMES
from shmllm.models.audio.fields import read_parakeet
from shmllm.models.audio.parakeet_specs import ParakeetTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.encoder_decoder import (
    check_has_encoder,
    name_of_pair,
    pairs_of_layers,
    rows_from,
    text_begins,
)
from shmllm.models.families.moonshine import NORMS, PARTS
from shmllm.models.fields import Fields
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
)
from shmllm.models.specs import NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

DEFAULTS: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 1280,
    "num_hidden_layers": 48,
    "intermediate_size": 5120,
    "num_mel_bins": 128,
    "scale_input": False,
}
_NORM_EPS = 1e-5
NAMES = {
    "model.": "model.decoder.",
    "decoder.embed_norm.": "decoder.embedding_layernorm.",
    "decoder.embed_positions.": "decoder.pos_emb.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
}
"""What transformers' modules call the weights."""
_PROJECTIONS = {"q": "query_net", "k": "key_net", "v": "value_net", "o": "out_projection"}
_IN_NEMO = {
    "model.": "model.transf_decoder._decoder.",
    "_decoder.embed_tokens.": "_embedding.token_embedding.",
    "_decoder.embed_norm.": "_embedding.layer_norm.",
    "_decoder.embed_positions.weight": "_embedding.position_embedding.pos_enc",
    "_decoder.norm.": "_decoder.final_layer_norm.",
    **{f".self_attn.{x}_proj.": f".first_sub_layer.{own}." for x, own in _PROJECTIONS.items()},
    **{f".encoder_attn.{x}_proj.": f".second_sub_layer.{own}." for x, own in _PROJECTIONS.items()},
    ".mlp.up_proj.": ".third_sub_layer.dense_in.",
    ".mlp.down_proj.": ".third_sub_layer.dense_out.",
    ".input_layernorm.": ".layer_norm_1.",
    ".post_attention_layernorm.": ".layer_norm_2.",
    ".final_layernorm.": ".layer_norm_3.",
}
"""What NeMo and published files call them."""
_POSITIONS = "model.embed_positions.weight"


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(DEFAULTS)
    encoder = read_encoder(fields, _ENCODER)
    encoder = replace(encoder, projected=fields.integer("hidden_size"), in_nemo=True)
    config = configure_decoder(fields, encoder, tied=False)
    return replace(config, skipped_prefixes=("preprocessor.featurizer.",))


def configure_decoder(fields: Fields, encoder: ParakeetTower, *, tied: bool) -> ModelConfig:
    """Returns the configuration of a model with a decoder of this kind.

    Args:
        fields: the decoder's fields.
        encoder: the encoder, without what it says of the decoder.
        tied: the default of ``tie_word_embeddings``.
    """
    has_bias, positions = fields.flag("attention_bias", True), read_positions(fields, 1024)
    attention = read_attention(fields, bias=has_bias, output_bias=has_bias)
    mlp = read_ungated_mlp(fields, activation="relu", bias=True)
    num_layers = read_num_layers(fields)
    begin = text_begins(max(encoder.num_embeddings(encoder.most_frames), positions))
    layers = pairs_of_layers(attention, attention, mlp, NORMS, begin, num_layers)
    start: int | None = None
    if fields.values.get("decoder_start_token_id") is not None:
        start = fields.integer("decoder_start_token_id", minimum=0)
    tower = replace(
        encoder,
        num_decoder_layers=num_layers,
        kv_width=attention.key_width,
        key_bias=has_bias,
    )
    return replace(
        read_model(fields, layers, begin + positions, tied=tied),
        norm=NormSpec(kind="layer", eps=_NORM_EPS, bias=True),
        embedding_norm=True,
        num_learned_positions=begin + positions,
        lm_head_bias=True,
        audio=AudioSpec(token=None, tower=tower, has_start=True, decoder_start=start),
    )


def read_encoder(fields: Fields, defaults: dict[str, Any]) -> ParakeetTower:
    """Returns the encoder that ``encoder_config`` describes.

    Args:
        fields: the fields around it.
        defaults: its fields where they are absent, if they differ from Parakeet's.
    """
    check_has_encoder(fields)
    encoder = fields.section("encoder_config", "parakeet_encoder")
    if encoder is None:
        encoder = Fields({}, f"{fields.where}: encoder_config")
    return read_parakeet(
        encoder.with_defaults(defaults),
        ParakeetTower,
        most_frames=MOST_PARAKEET_FRAMES,
        num_decoder_layers=1,
        kv_width=1,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return _under_names(weights, config, _IN_NEMO)


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under the names of transformers' modules."""
    return _under_names(weights, config, NAMES)


def _under_names(
    weights: NamedWeights, config: ModelConfig, names: Mapping[str, str]
) -> NamedWeights:
    found = dict(weights)
    found[_POSITIONS] = rows_from(found[_POSITIONS], config.num_encoded)
    return {renamed(name_of_pair(name, PARTS), names): views for name, views in found.items()}
