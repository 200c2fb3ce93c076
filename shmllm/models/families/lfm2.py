"""LFM2: layers of a gated short convolution, and some of attention with norms of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mamba_fields import CHANNEL_MULTIPLE
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.readers import (
    FULL,
    read_attention,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.recurrent_specs import ShortConvolutionSpec
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

CONVOLUTION = "conv"
"""The type of layers with a convolution, as in the field ``layer_types``."""
MOST_TAPS = 8
"""The most tokens that a gated convolution reads."""
_OLD_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""The names of fields in the first files, which have precedence, and today's."""

NORMS = LayerNorms(before_mixer="operator_norm", before_mlp="ffn_norm")
NAMES = {
    "model.norm.": "model.embedding_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}


def configure(fields: Fields) -> ModelConfig:
    old = {
        today: fields.values[name] for name, today in _OLD_NAMES.items() if name in fields.values
    }
    fields = fields.with_values(fields.values | old)
    mlp = MLPSpec(inner=_inner(fields))
    return read_hybrid(fields, [mlp] * read_num_layers(fields))


def with_old_names(fields: Fields) -> Fields:
    """Returns the fields with those of the first files under today's names."""
    values = fields.values
    old = {today: values[name] for name, today in _OLD_NAMES.items() if name in values}
    return fields.with_values(values | old)


def read_hybrid(fields: Fields, feed_forwards: Sequence[FeedForwardSpec]) -> ModelConfig:
    """Returns a model with the feed-forwards of its layers, whose mixers are attention and
    convolutions."""
    positions = read_positions(fields, 128_000)
    types = _read_types(fields, len(feed_forwards))
    mixers = {name: _READERS[name](fields, positions) for name in dict.fromkeys(types)}
    layers = [
        LayerSpec(mixer=mixers[name], mlp=feed_forward, norms=NORMS)
        for name, feed_forward in zip(types, feed_forwards, strict=True)
    ]
    model = read_model(fields, layers, positions, tied=True)
    return replace(model, norm=read_norm(fields, "norm_eps", 1e-5))


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns ``layer_types``, or what ``full_attn_idxs`` of the first files says."""
    types = read_layer_types(fields, num_layers, (FULL, CONVOLUTION))
    if types is not None:
        return types
    attending = fields.values.get("full_attn_idxs")
    if attending is None:
        return (FULL,) * num_layers
    if not isinstance(attending, list) or any(type(index) is not int for index in attending):
        raise fields.error("'full_attn_idxs' must be a list of layers' numbers")
    return tuple(FULL if index in attending else CONVOLUTION for index in range(num_layers))


def _read_attention(fields: Fields, positions: int) -> MixerSpec:
    attention = read_attention(fields, num_kv_heads=8)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=1_000_000.0)
    return replace(attention, rope=rope, qk_norm="head")


def read_convolution(fields: Fields, default_taps: int = 3) -> ShortConvolutionSpec:
    """Returns a convolution of as many channels as a hidden state has.

    Args:
        fields: the fields of config.json.
        default_taps: the default of ``conv_L_cache``.
    """
    width = fields.integer("hidden_size")
    if width % CHANNEL_MULTIPLE:
        raise fields.error(f"hidden_size ({width}) must be a multiple of {CHANNEL_MULTIPLE}")
    taps = fields.integer("conv_L_cache", default_taps, minimum=2, maximum=MOST_TAPS)
    return ShortConvolutionSpec(width=width, taps=taps, bias=fields.flag("conv_bias", False))


_READERS: dict[str, Callable[[Fields, int], MixerSpec]] = {
    FULL: _read_attention,
    CONVOLUTION: lambda fields, positions: read_convolution(fields),
}


def _inner(fields: Fields) -> int:
    """Returns the width of the MLPs' activations: ``intermediate_size``, or two thirds of it,
    multiplied by ``block_ffn_dim_multiplier`` and rounded up to a multiple of
    ``block_multiple_of``."""
    inner = fields.integer("intermediate_size", 12288)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = fields.integer("block_multiple_of", 256)
    return -(-inner // multiple) * multiple


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, NAMES): views for name, views in weights.items()}
