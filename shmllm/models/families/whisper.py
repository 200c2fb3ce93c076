"""Whisper: an encoder of sounds, and a decoder of its results (Radford et al., 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.audio.fields import read_whisper
from shmllm.models.audio.specs import AudioSpec, KeysTower
from shmllm.models.config import ModelConfig
from shmllm.models.encoder_decoder import (
    check_has_encoder,
    name_of_pair,
    pairs_of_layers,
    rows_from,
    text_begins,
)
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.readers import MOST_LAYERS, read_activation, read_attention, read_model
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {"vocab_size": 51865}
_NORM_EPS = 1e-5
_SELF, _CROSS = "self_attn", "encoder_attn"
_NORMS = (
    LayerNorms(before_mixer=f"{_SELF}_layer_norm"),
    LayerNorms(before_mixer=f"{_CROSS}_layer_norm", before_mlp="final_layer_norm"),
)
_NAMES = {
    "model.": "model.decoder.",
    "decoder.norm.": "decoder.layer_norm.",
    ".o_proj.": ".out_proj.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
}
_POSITIONS = "model.decoder.embed_positions.weight"


def configure(fields: Fields) -> ModelConfig:
    check_has_encoder(fields)
    width = fields.integer("d_model", 384)
    own = {
        "hidden_size": width,
        "num_attention_heads": fields.integer("decoder_attention_heads", 6),
        "num_key_value_heads": None,
        "head_dim": None,
    }
    fields = fields.with_defaults(_DEFAULTS).with_values(fields.values | own)
    tower = read_whisper(fields, KeysTower, num_layers=4, num_heads=6, inner=1536, num_mels=80)
    num_layers = fields.integer("decoder_layers", 4, maximum=MOST_LAYERS)
    tower = replace(tower, num_decoder_layers=num_layers, kv_width=width)
    num_positions = fields.integer("max_target_positions", 448)
    num_encoded = text_begins(tower.num_positions)
    if num_positions > num_encoded:
        raise fields.error(
            f"max_target_positions {num_positions} exceeds max_source_positions "
            f"{tower.num_positions}"
        )
    attention = replace(read_attention(fields, bias=True, output_bias=True), key_bias=False)
    mlp = MLPSpec(
        inner=fields.integer("decoder_ffn_dim", 1536),
        activation=read_activation(fields, "activation_function", "gelu"),
        gated=False,
        bias=True,
    )
    layers = pairs_of_layers(attention, attention, mlp, _NORMS, num_encoded, num_layers)
    model = read_model(fields, layers, num_encoded + num_positions, tied=True)
    return replace(
        model,
        norm=NormSpec(kind="layer", eps=_NORM_EPS, bias=True),
        num_learned_positions=num_encoded + num_positions,
        audio=AudioSpec(token=None, tower=tower),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    parts = f"{_SELF}.", f"{_CROSS}."
    named = {renamed(name_of_pair(name, parts), _NAMES): views for name, views in weights.items()}
    named[_POSITIONS] = rows_from(named[_POSITIONS], config.num_encoded)
    return named
