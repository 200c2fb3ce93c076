"""The thinker of Qwen 2.5 Omni, which reads and writes text: the encoder of Qwen 2.5 VL for images
and videos, one for sounds, and Qwen 2 with three axes.

Its positions are triples, see `qwen2_5_vl`, whose times are seconds of a video by
``position_id_per_seconds``. Those of sounds are three equal numbers, one for each embedding: there
are as many in a second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.fields import read_omni_encoder
from shmllm.models.audio.omni_specs import Qwen2_5OmniAudioTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2, qwen2_5_vl, qwen2_vl
from shmllm.models.families.qwen2_audio import AUDIO_TOKEN
from shmllm.models.fields import Fields
from shmllm.models.rope_config import VideoTimes
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import TOKENS, read_video, with_vision
from shmllm.models.vision.specs import VisionSpec

_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 32768,
}


def configure(fields: Fields) -> ModelConfig:
    config = qwen2.configure(fields.with_defaults(_TEXT_DEFAULTS), num_kv_heads=4)
    tied = fields.whole.flag("tie_word_embeddings", False)  # that of text_config never counts
    config = replace(config, tie_word_embeddings=tied, audio=read_audio(fields, config))
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, qwen2_vl.SECTIONS, mixes_axes=False)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "qwen2_5_omni_vision_encoder")
    if vision is None:
        return None
    tower = replace(qwen2_5_vl.read_tower(vision, config.hidden_size), has_apart=True)
    per_second = fields.whole.integer("position_id_per_seconds", 25)
    names = "image_token_id", "image_token_index"
    return VisionSpec(
        image_token=read_item_token(fields, names, TOKENS.image, config.vocab_size),
        tower=tower,
        merge_size=tower.merge_size,
        has_axes=True,
        video=read_video(
            fields,
            ("Qwen2VLVideoProcessor",),
            config.vocab_size,
            in_one_piece=True,
            times=VideoTimes(per_second, is_aligned=True),
        ),
    )


def read_audio(fields: Fields, config: ModelConfig) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    audio = fields.whole.section("audio_config", "qwen2_5_omni_audio_encoder")
    if audio is None:
        return None
    tower = read_omni_encoder(audio, Qwen2_5OmniAudioTower, config.hidden_size)
    window = audio.integer("n_window", 100, maximum=tower.num_positions)
    names = "audio_token_id", "audio_token_index"
    return AudioSpec(
        token=read_item_token(fields, names, AUDIO_TOKEN, config.vocab_size),
        tower=replace(tower, window=window),
    )
