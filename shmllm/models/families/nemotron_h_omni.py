"""Nemotron 3 Omni: Nemotron-H, which hears by Parakeet's encoder. Its tower for images and videos
is not here."""

from __future__ import annotations

from dataclasses import replace

from shmllm.formats.audio_settings import MOST_OMNI_FRAMES
from shmllm.models.audio.fields import read_parakeet
from shmllm.models.audio.parakeet_specs import NemotronOmniAudioTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import nemotron_h
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token

_AUDIO_DEFAULTS = {"attention_bias": False, "scale_input": False}
"""Where they differ from Parakeet's."""
_SKIPPED = (
    *("sound_encoder.", "sound_projection.", "vision_final_layernorm."),
    *("vision_projector.", "model.mtp."),
)

named_weights = nemotron_h.named_weights
module_weights = nemotron_h.module_weights


def configure(fields: Fields) -> ModelConfig:
    config = nemotron_h.configure(fields)
    return replace(config, audio=read_audio(fields, config), skipped_prefixes=_SKIPPED)


def read_audio(fields: Fields, config: ModelConfig) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    whole = fields.whole
    audio = whole.section("audio_config", "parakeet_encoder")
    if audio is None:
        return None
    tower = read_parakeet(
        audio.with_defaults(_AUDIO_DEFAULTS),
        NemotronOmniAudioTower,
        most_frames=MOST_OMNI_FRAMES,
        projector_width=audio.integer("projection_hidden_size"),
        projector_bias=audio.flag("projection_bias", False),
    )
    token = whole.integer("audio_token_id", minimum=0)
    token = read_item_token(fields, ("audio_token_id",), token, config.vocab_size)
    return AudioSpec(token=token, tower=tower)
