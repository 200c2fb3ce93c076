"""MOSS-Transcribe-Diarize, which writes who says what in a sound, and when: Whisper's encoder for
sounds in parts of 30 seconds, two projections, and Qwen 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.fields import in_names_of_whisper, read_whisper
from shmllm.models.audio.specs import AudioSpec, MossTower
from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_vision_activation

_AUDIO_TOKEN = 151671
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}
_AUDIO_DEFAULTS = {"d_model": 1024}


def configure(fields: Fields) -> ModelConfig:
    config = qwen3.configure(fields.with_defaults(_TEXT_DEFAULTS))
    tied = fields.whole.flag("tie_word_embeddings", True)
    return replace(config, audio=read_audio(fields, config), tie_word_embeddings=tied)


def read_audio(fields: Fields, config: ModelConfig) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    whole = fields.whole
    audio = whole.section("audio_config", "moss_transcribe_diarize_audio")
    if audio is None:
        return None
    tower = read_whisper(
        in_names_of_whisper(audio).with_defaults(_AUDIO_DEFAULTS),
        MossTower,
        num_layers=24,
        num_heads=16,
        inner=4096,
        num_mels=80,
    )
    factor = whole.integer("audio_merge_size", 4)
    if tower.num_positions % factor:
        raise whole.error(
            f"audio_merge_size ({factor}) must divide max_source_positions ({tower.num_positions})"
        )
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), _AUDIO_TOKEN, config.vocab_size),
        tower=replace(
            tower,
            factor=factor,
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "silu"),
            projector_bias=whole.flag("projector_bias", True),
            eps=config.norm.eps,
        ),
    )
