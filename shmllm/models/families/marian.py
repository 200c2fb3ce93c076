"""Marian (Junczys-Dowmunt et al., 2018), as of OPUS-MT: BART with sinusoids of positions, without a
norm of embeddings. The decoder begins with the padding, the last token, and never generates it."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import bart
from shmllm.models.fields import Fields

_VOCABULARY = 58_101
_KIND = bart.BartKind(
    embedding_norm=False,
    sinusoids="marian",
    first_position=0,
    vocab_size=_VOCABULARY,
    decoder_start=_VOCABULARY - 1,
)


def configure(fields: Fields) -> ModelConfig:
    if not fields.flag("share_encoder_decoder_embeddings", True):
        raise fields.error("share_encoder_decoder_embeddings false is not supported")
    model = bart.configure_kind(fields, _KIND)
    size = model.vocab_size
    if (own := fields.optional_integer("decoder_vocab_size")) not in (None, size):
        raise fields.error(f"decoder_vocab_size {own} is not supported; supported: {size}")
    padding = fields.integer("pad_token_id", _VOCABULARY - 1, minimum=0)
    return replace(model, num_outputs=size - 1 if padding == size - 1 else None)


named_weights = bart.named_weights
