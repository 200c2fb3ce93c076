"""GLM-ASR, which writes what a sound says: an encoder like Whisper's with rotations, and Llama."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from shmllm.models.audio.fields import NAMES_OF_WHISPER, read_whisper
from shmllm.models.audio.specs import AudioSpec, GlmAsrTower, WhisperTower
from shmllm.models.config import ModelConfig
from shmllm.models.families import llama
from shmllm.models.fields import Fields
from shmllm.models.rope_config import RopeConfig
from shmllm.models.vision.fields import read_item_token, read_vision_activation

_AUDIO_TOKEN = 59260
_FACTOR = 4
"""How many positions become an embedding, which transformers' counts of embeddings assume."""
_NAMES = NAMES_OF_WHISPER | {
    "hidden_act": "activation_function",
    "max_position_embeddings": "max_source_positions",
}
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 59264,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def configure(fields: Fields) -> ModelConfig:
    config = llama.configure(fields.with_defaults(_TEXT_DEFAULTS))
    tied = fields.whole.flag("tie_word_embeddings", True)
    audio = read_audio(fields, config.vocab_size)
    return replace(config, audio=audio, tie_word_embeddings=tied)


def read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    whole = fields.whole
    audio = whole.section("audio_config", "glmasr_encoder")
    if audio is None:
        return None
    named = audio.under_names({of_whisper: (name, None) for name, of_whisper in _NAMES.items()})
    plain = read_whisper(named, WhisperTower, num_layers=32, num_heads=20, inner=5120, num_mels=128)
    width, head_dim = plain.hidden_size, plain.hidden_size // plain.num_heads
    for name, found in (("num_key_value_heads", plain.num_heads), ("head_dim", head_dim)):
        if (value := audio.integer(name, found)) != found:
            raise audio.error(f"{name} {value} is not supported; supported: {found}")
    if plain.inner != _FACTOR * width or plain.num_positions % _FACTOR:
        raise audio.error(
            f"intermediate_size ({plain.inner}) must be {_FACTOR} times hidden_size ({width}), "
            f"and max_position_embeddings ({plain.num_positions}) a multiple of {_FACTOR}"
        )
    rope = RopeConfig.from_fields(audio, plain.num_positions, head_dim, partial=0.5)
    if rope.type != "default" or rope.sections:
        raise audio.error(f"rope type {rope.type!r} is not supported; supported: 'default'")
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), _AUDIO_TOKEN, vocab_size),
        tower=GlmAsrTower(
            **asdict(plain),
            rotary_dim=rope.rotary_dim,
            theta=rope.theta,
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
        ),
    )
