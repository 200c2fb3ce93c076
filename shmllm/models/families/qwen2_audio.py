"""Qwen 2 Audio: Whisper's encoder for sounds of up to 30 seconds, and Qwen 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.fields import read_whisper
from shmllm.models.audio.specs import AudioSpec, WhisperTower
from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token

AUDIO_TOKEN = 151646
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def configure(fields: Fields) -> ModelConfig:
    config = qwen2.configure(fields.with_defaults(TEXT_DEFAULTS))
    return replace(config, audio=read_audio(fields, config.vocab_size))


def read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    audio = fields.whole.section("audio_config", "qwen2_audio_encoder")
    if audio is None:
        return None
    return AudioSpec(
        token=read_item_token(
            fields, ("audio_token_id", "audio_token_index"), AUDIO_TOKEN, vocab_size
        ),
        tower=read_whisper(
            audio, WhisperTower, num_layers=32, num_heads=20, inner=5120, num_mels=128
        ),
    )
