"""mBART (Liu et al., 2020): BART with norms before attention and MLP, and behind all layers."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import bart
from shmllm.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    return bart.configure_kind(fields, bart.BartKind(is_pre_norm=True, decoder_start=None))


named_weights = bart.named_weights
