"""Whisper: an encoder of sounds, and a decoder that attends to its results (Radford et al., 2022).

A request begins with the positions of the encoder, and its text follows. Each layer of the decoder
is two here: its attention to the text, and its attention to the encoder with the MLP. The second
one reads the first one's part of the KV cache, where a position of the encoder has the keys and
values that the second one projects, and a position of text those of the first one. So a token's
attention to text is a chunk that begins behind the encoder's positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.audio.fields import read_whisper
from shmllm.models.audio.specs import AudioSpec, KeysTower
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, Encoded
from shmllm.models.readers import MOST_LAYERS, read_activation, read_attention, read_model
from shmllm.models.specs import LayerNorms, LayerSpec, MLPSpec, NormSpec
from shmllm.models.weight_names import renamed
from shmllm_kernels.windows import Chunk

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {"vocab_size": 51865}
_NORM_EPS = 1e-5
_ROUNDED = 128
"""The text begins at a multiple of this many positions. So a block of the KV cache has none of
both, and those of the encoder are found whatever the text is."""
_SELF, _CROSS = "self_attn", "encoder_attn"
_NAMES = {
    "model.": "model.decoder.",
    "decoder.norm.": "decoder.layer_norm.",
    ".o_proj.": ".out_proj.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
}
_POSITIONS = "model.decoder.embed_positions.weight"


def configure(fields: Fields) -> ModelConfig:
    if "audio_config" in fields.values:
        raise fields.error(
            "the decoder needs its encoder, which language_model_only leaves out, and a draft lacks"
        )
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
    encoded = Encoded(tower.num_positions, -(-tower.num_positions // _ROUNDED) * _ROUNDED)
    num_encoded = encoded.text_begins
    if num_positions > num_encoded:
        raise fields.error(
            f"max_target_positions {num_positions} exceeds max_source_positions "
            f"{tower.num_positions}"
        )
    own_attention = read_attention(fields, bias=True, output_bias=True)
    own_attention = replace(own_attention, key_bias=False, window=Chunk(num_encoded))
    mlp = MLPSpec(
        inner=fields.integer("decoder_ffn_dim", 1536),
        activation=read_activation(fields, "activation_function", "gelu"),
        gated=False,
        bias=True,
    )
    pairs = (_layers(own_attention, mlp, encoded, index) for index in range(num_layers))
    layers = [layer for pair in pairs for layer in pair]
    model = read_model(fields, layers, num_encoded + num_positions, tied=True)
    return replace(
        model,
        norm=NormSpec(kind="layer", eps=_NORM_EPS, bias=True),
        num_learned_positions=num_encoded + num_positions,
        audio=AudioSpec(token=None, tower=tower),
    )


def _layers(
    own: AttentionSpec, mlp: MLPSpec, encoded: Encoded, index: int
) -> tuple[LayerSpec, LayerSpec]:
    """Returns the two layers that one of the checkpoint's is."""
    cross = replace(own, window=None, ahead=encoded, source=2 * index)
    return (
        LayerSpec(mixer=own, mlp=None, norms=LayerNorms(before_mixer=f"{_SELF}_layer_norm")),
        LayerSpec(
            mixer=cross,
            mlp=mlp,
            norms=LayerNorms(before_mixer=f"{_CROSS}_layer_norm", before_mlp="final_layer_norm"),
        ),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.matrices import matrix_of

    named = {_own_name(name): views for name, views in weights.items()}
    positions = matrix_of(named[_POSITIONS])
    sizes = [config.num_encoded, config.max_position_embeddings - config.num_encoded]
    named[_POSITIONS] = positions.split_with_sizes(sizes)[1:]
    return named


def _own_name(name: str) -> str:
    """Returns a checkpoint's name: that of the layer which two of ours are."""
    prefix, _, behind = name.partition(".layers.")
    if behind:
        index, _, behind = behind.partition(".")
        layer, is_cross = divmod(int(index), 2)
        behind = behind.replace(f"{_SELF}.", f"{_CROSS}.") if is_cross else behind
        name = f"{prefix}.layers.{layer}.{behind}"
    return renamed(name, _NAMES)
