"""Reads what configurations say of encoders of sounds. It must not import torch."""

from __future__ import annotations

from typing import TypeVar

from shmllm.models.audio.specs import WhisperTower
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import MOST_LAYERS, read_num_heads, read_vision_activation

Tower = TypeVar("Tower", bound=WhisperTower)


def audio_fields(fields: Fields, model_type: str) -> Fields | None:
    """Returns the fields of the model's ``audio_config``; None: it has none, and hears nothing.

    Args:
        fields: what `configure` got.
        model_type: what its ``model_type`` has to be, or is if it is absent.
    """
    values = fields.whole.table("audio_config")
    if not values:
        return None
    audio = Fields(values, f"{fields.whole.where}: audio_config")
    if (found := audio.text("model_type", model_type)) != model_type:
        raise audio.error(f"model_type {found!r} is not supported; supported: {model_type}")
    return audio


def read_omni_encoder(audio: Fields, kind: type[Tower], hidden_size: int) -> Tower:
    """Returns the encoder of an omni model of Qwen, whose positions are sines.

    Args:
        audio: the fields of ``audio_config``.
        kind: what its results are for.
        hidden_size: the width of the language model's embeddings.
    """
    if (output := audio.integer("output_dim", 3584)) != hidden_size:
        raise audio.error(
            f"output_dim ({output}) differs from the language model's hidden_size ({hidden_size})"
        )
    tower = read_whisper(audio, kind, num_layers=32, num_heads=20, inner=5120, num_mels=128)
    if tower.hidden_size % 2 or tower.hidden_size == 2:
        raise audio.error(f"d_model ({tower.hidden_size}) must be an even number above 2")
    return tower


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
