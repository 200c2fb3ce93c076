"""Pegasus (Zhang et al., 2020): mBART with sinusoids of positions, and without a norm of
embeddings."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import bart
from shmllm.models.fields import Fields

_KIND = bart.BartKind(
    is_pre_norm=True, embedding_norm=False, sinusoids="marian", first_position=0, decoder_start=0
)


def configure(fields: Fields) -> ModelConfig:
    return bart.configure_kind(fields, _KIND)


named_weights = bart.named_weights
