"""Audio Flamingo 3: Whisper's encoder for sounds in parts of 30 seconds, two projections, and
Qwen 2."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.audio.fields import in_names_of_whisper, read_whisper
from shmllm.models.audio.specs import AudioFlamingoTower, AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2
from shmllm.models.families.qwen2_audio import TEXT_DEFAULTS
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_vision_activation

_AUDIO_TOKEN = 151669
_TYPES = ("audioflamingo3_encoder",)


def configure(fields: Fields, types: tuple[str, ...] = _TYPES) -> ModelConfig:
    config = qwen2.configure(fields.with_defaults(TEXT_DEFAULTS))
    audio = read_audio(fields, config.vocab_size, types)
    return replace(config, audio=audio, tie_word_embeddings=False)  # whatever the file says


def read_audio(fields: Fields, vocab_size: int, types: tuple[str, ...]) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``, whose model_type
    is one of `types`."""
    whole = fields.whole
    audio = whole.section("audio_config", *types)
    if audio is None:
        return None
    tower = read_whisper(
        in_names_of_whisper(audio),
        AudioFlamingoTower,
        num_layers=32,
        num_heads=20,
        inner=5120,
        num_mels=128,
    )
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), _AUDIO_TOKEN, vocab_size),
        tower=replace(
            tower,
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
            projector_bias=whole.flag("projector_bias", True),
        ),
    )
