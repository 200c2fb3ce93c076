"""T5Gemma: an encoder of texts with Gemma 2's layers, and a decoder with such layers, which
attends to its results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.encoder_decoder import name_of_pair, pairs_of_layers, text_begins
from shmllm.models.families.gemma2 import configure as configure_gemma
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.specs import MLPSpec
from shmllm.models.text.specs import GemmaTower, TextSpec, activation_of
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NORMS = (
    LayerNorms(before_mixer="pre_self_attn_layernorm", after_mixer="post_self_attn_layernorm"),
    LayerNorms(
        before_mixer="pre_cross_attn_layernorm",
        after_mixer="post_cross_attn_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
)
_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_NAMES = {
    "model.embed_tokens.": "model.decoder.embed_tokens.",
    "model.layers.": "model.decoder.layers.",
    "model.norm.": "model.decoder.norm.",
    "lm_head.": "lm_head.out_proj.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    decoder, encoder = (_configure_part(fields, name) for name in ("decoder", "encoder"))
    mlp, attention = _parts(decoder)
    positions = encoder.max_position_embeddings
    begin, num_layers = text_begins(positions), decoder.num_layers
    # No text is longer than a window: its tokens attend to all before them in each layer.
    most = min([decoder.max_position_embeddings, *_windows(decoder)])
    layers = pairs_of_layers(
        attention, replace(attention, rope=None), mlp, _NORMS, begin, num_layers
    )
    start = Fields(fields.table("decoder"), f"{fields.where}: decoder")
    is_tied = decoder.tie_word_embeddings
    return replace(
        decoder,
        layers=tuple(layers),
        max_position_embeddings=begin + most,
        skipped_prefixes=("lm_head.out_proj.",) if is_tied else (),
        text=TextSpec(
            _read_tower(fields, encoder, decoder), start.integer("bos_token_id", 2, minimum=0)
        ),
    )


def _configure_part(fields: Fields, name: str) -> ModelConfig:
    """Returns the encoder or the decoder as a Gemma 2."""
    own = Fields(fields.table(name), f"{fields.where}: {name}").with_defaults(_DEFAULTS)
    of_whole = {
        "architectures": fields.values.get("architectures"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }
    return configure_gemma(own.with_values(own.values | of_whole))


def _parts(model: ModelConfig) -> tuple[MLPSpec, AttentionSpec]:
    """Returns the MLP and the attention of all layers but for its window."""
    layer = model.layers[0]
    assert isinstance(layer.mlp, MLPSpec), "Gemma 2 has MLPs"
    assert layer.attention is not None, "Gemma 2 has attention"
    return layer.mlp, replace(layer.attention, window=None)


def _windows(model: ModelConfig) -> list[int]:
    return [window for window in model.layer_windows if isinstance(window, int)]


def _read_tower(fields: Fields, encoder: ModelConfig, decoder: ModelConfig) -> GemmaTower:
    (mlp, attention), (_, of_decoder) = _parts(encoder), _parts(decoder)
    assert attention.rope is not None, "Gemma 2 rotates"
    windows = [each if isinstance(each, int) else None for each in encoder.layer_windows]
    return GemmaTower(
        hidden_size=encoder.hidden_size,
        num_layers=encoder.num_layers,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        inner=mlp.inner,
        activation=activation_of(fields, mlp),
        most_tokens=encoder.max_position_embeddings,
        embedding_scale=encoder.embedding_scale,
        num_decoder_layers=decoder.num_layers,
        kv_width=of_decoder.key_width,
        vocab_size=encoder.vocab_size,
        num_kv_heads=attention.num_kv_heads,
        scale=attention.scale,
        soft_cap=attention.soft_cap,
        rope=attention.rope,
        windows=tuple(windows),
        eps=encoder.norm.eps,
        has_bias=attention.bias,
        keys_have_bias=of_decoder.bias,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    parts = "self_attn.", "cross_attn."
    return {renamed(name_of_pair(name, parts), _NAMES): views for name, views in weights.items()}
