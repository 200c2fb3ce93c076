"""Reads what configurations say of encoders of sounds. It must not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from shmllm.models.audio.omni_specs import Qwen3OmniAudioTower
from shmllm.models.audio.specs import WhisperTower, num_convolved
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import MOST_LAYERS, read_num_heads, read_vision_activation

Tower = TypeVar("Tower", bound=WhisperTower)
NAMES_OF_WHISPER = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""Other names of fields of ``audio_config``, for those of Whisper."""
_POSITIONS = 13
"""Those of a chunk of a sound, which transformers' counts of embeddings assume."""


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


def read_convolved(
    audio: Fields, hidden_size: int, *, fills: bool = False, has_projector: bool = False
) -> Qwen3OmniAudioTower:
    """Returns an encoder of chunks behind convolutions.

    Args:
        audio: the fields of ``audio_config``.
        hidden_size: the width of the language model's embeddings.
        fills, has_projector: see `Qwen3OmniAudioTower`.
    """
    tower = read_omni_encoder(audio, Qwen3OmniAudioTower, hidden_size)
    window = audio.integer("n_window", 50)
    if num_convolved(2 * window) != _POSITIONS:
        raise audio.error(f"n_window {window} is not supported; supported: 49 to 52")
    together = audio.integer("n_window_infer", 800, minimum=2 * window) // (2 * window)
    return replace(
        tower,
        window=window,
        chunks_together=together,
        channels=audio.integer("downsample_hidden_size", 480),
        fills=fills,
        has_projector=has_projector,
    )


def in_names_of_whisper(audio: Fields) -> Fields:
    """Returns fields under the names that Whisper has for them; those that are there win."""
    renamed = {NAMES_OF_WHISPER.get(name, name): value for name, value in audio.values.items()}
    return audio.with_values(renamed | audio.values)


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
