"""The thinker of Qwen 3 Omni, which reads and writes text: the encoder of Qwen 3 VL for images and
videos, one with convolutions for sounds, and Qwen 3 MoE with three axes.

Positions are those of `qwen2_5_omni`. transformers computes with parts of a position where the
time of a frame is none; here times are rounded down, as in vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.fields import read_convolved
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_moe, qwen3_vl
from shmllm.models.families.qwen2_audio import AUDIO_TOKEN
from shmllm.models.fields import Fields
from shmllm.models.rope_config import VideoTimes
from shmllm.models.vision.fields import read_item_token
from shmllm.models.vision.qwen_fields import read_video, with_vision
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Qwen3Tower

_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
}


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window true is not supported; supported: false")
    config = qwen3_moe.configure(fields.with_defaults(_TEXT_DEFAULTS))
    tied = fields.whole.flag("tie_word_embeddings", False)  # that of text_config never counts
    config = replace(config, tie_word_embeddings=tied, audio=read_audio(fields, config))
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, qwen3_vl.SECTIONS, mixes_axes=True)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = qwen3_vl.read_vision(fields, config, ("qwen3_omni_moe_vision_encoder",))
    if vision is None:
        return None
    assert isinstance(vision.tower, Qwen3Tower), "it is that of Qwen 3 VL"
    video = read_video(
        fields,
        ("Qwen2VLVideoProcessor",),
        config.vocab_size,
        in_one_piece=True,
        times=VideoTimes(fields.whole.integer("position_id_per_seconds", 25), is_aligned=True),
    )
    return replace(vision, tower=replace(vision.tower, is_omni=True), video=video)


def read_audio(fields: Fields, config: ModelConfig) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    audio = fields.whole.section("audio_config", "qwen3_omni_moe_audio_encoder")
    if audio is None:
        return None
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), AUDIO_TOKEN, config.vocab_size),
        tower=read_convolved(audio, config.hidden_size),
    )
