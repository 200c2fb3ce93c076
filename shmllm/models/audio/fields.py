"""Reads what configurations say of encoders of sounds. It must not import torch."""

from __future__ import annotations

from typing import TypeVar

from shmllm.models.audio.specs import WhisperTower
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import MOST_LAYERS, read_num_heads, read_vision_activation

Tower = TypeVar("Tower", bound=WhisperTower)


def read_whisper(
    audio: Fields, kind: type[Tower], *, num_layers: int, num_heads: int, inner: int, num_mels: int
) -> Tower:
    """Returns Whisper's encoder.

    Args:
        audio: the fields with the names of transformers' ``WhisperConfig``.
        kind: what its results are for.
        num_layers, num_heads, inner, num_mels: what absent fields stand for.
    """
    hidden_size = audio.integer("d_model", 1280)
    return kind(
        hidden_size=hidden_size,
        num_layers=audio.integer("encoder_layers", num_layers, maximum=MOST_LAYERS),
        num_heads=read_num_heads(
            audio, "encoder_attention_heads", num_heads, hidden_size, "d_model"
        ),
        inner=audio.integer("encoder_ffn_dim", inner),
        activation=read_vision_activation(audio, "activation_function", "gelu"),
        num_mels=audio.integer("num_mel_bins", num_mels),
        num_positions=audio.integer("max_source_positions", 1500),
    )
