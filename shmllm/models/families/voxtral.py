"""Voxtral: Whisper's encoder for sounds in parts of 30 seconds, two projections, and Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.fields import in_names_of_whisper, read_whisper
from shmllm.models.audio.specs import AudioSpec, VoxtralTower
from shmllm.models.config import ModelConfig
from shmllm.models.families import llama
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_vision_activation

AUDIO_TOKEN = 24
"""The one that transformers' processor has, whose configuration has none."""
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}


def configure(fields: Fields) -> ModelConfig:
    config = llama.configure(fields.with_defaults(_TEXT_DEFAULTS))
    audio = read_audio(fields, config.vocab_size)
    return replace(config, audio=audio, tie_word_embeddings=False)  # whatever the file says


def read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    whole = fields.whole
    audio = whole.section("audio_config", "voxtral_encoder")
    if audio is None:
        return None
    audio = in_names_of_whisper(audio)
    tower = read_whisper(audio, VoxtralTower, num_layers=32, num_heads=20, inner=5120, num_mels=128)
    factor = tower.inner // tower.hidden_size
    if tower.inner != factor * tower.hidden_size or tower.num_positions % factor:
        raise audio.error(
            f"intermediate_size ({tower.inner}) must be a multiple of hidden_size "
            f"({tower.hidden_size}), by a factor of max_source_positions ({tower.num_positions})"
        )
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), AUDIO_TOKEN, vocab_size),
        tower=replace(
            tower,
            factor=factor,
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
        ),
    )
