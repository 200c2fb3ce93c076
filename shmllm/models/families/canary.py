"""Canary, which writes what a sound says, or a translation of it: Parakeet's encoder, and a decoder
whose positions are sinusoids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.encoder_decoder import name_of_pair
from shmllm.models.families.cohere_asr import DEFAULTS, NAMES, configure_decoder, read_encoder
from shmllm.models.families.moonshine import PARTS
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ENCODER: dict[str, Any] = {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False}
"""Where config.json has no ``encoder_config``; the fields of one have Parakeet's defaults."""
_WHOLE = ("architectures", "tie_word_embeddings", "decoder_start_token_id")


def configure(fields: Fields) -> ModelConfig:
    encoder = read_encoder(fields, {} if fields.values.get("encoder_config") else _ENCODER)
    decoder = fields.section("decoder_config", "canary_decoder")
    found = {} if decoder is None else decoder.values
    whole = {name: fields.values[name] for name in _WHOLE if name in fields.values}
    own = Fields({"head_dim": 128, **found, **whole}, f"{fields.where}: decoder_config")
    own = own.with_defaults({**DEFAULTS, "decoder_start_token_id": 7})
    if own.integer("hidden_size") != encoder.hidden_size:
        raise own.error(
            f"hidden_size ({own.integer('hidden_size')}) differs from that of encoder_config "
            f"({encoder.hidden_size})"
        )
    if (size := fields.integer("vocab_size", 16384)) != own.integer("vocab_size"):
        raise own.error(
            f"vocab_size ({own.integer('vocab_size')}) differs from the model's ({size})"
        )
    config = configure_decoder(own, encoder, tied=True)
    skipped = ("model.decoder.pos_emb.",)
    return replace(config, sinusoids="nemo", skipped_prefixes=skipped)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name_of_pair(name, PARTS), NAMES): views for name, views in weights.items()}
