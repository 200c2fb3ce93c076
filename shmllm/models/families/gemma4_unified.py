"""Gemma 4 12B: Gemma 4 without towers. Embeddings of images are projections of their pixels, those
of sounds projections of their samples."""

from __future__ import annotations

from typing import Any

from shmllm.models.audio.specs import AudioSpec, SamplesTower
from shmllm.models.config import ModelConfig
from shmllm.models.families import gemma4
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.families.gemma4_towers import MOST_SOFT_TOKENS
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.specs import VideoSpec, VisionSpec
from shmllm.models.vision.squares_specs import PixelsTower

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
}
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS).with_defaults(_SIZES)
    check_choice(fields, "hidden_size_per_layer_input", 0)
    check_choice(fields, "enable_moe_block", False)
    vocab_size = fields.integer("vocab_size")
    vision = read_vision(fields, vocab_size)
    return gemma4.configure_with(fields, vision, _read_audio(fields, vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "gemma4_unified_vision")
    if vision is None:
        return None
    merge_size, width = (
        vision.integer("pooling_kernel_size", 3),
        vision.integer("mm_embed_dim", 3840),
    )
    if (out := vision.integer("output_proj_dims", 3840)) != width:
        raise vision.error(f"output_proj_dims ({out}) differs from mm_embed_dim ({width})")
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 258_880, vocab_size),
        tower=PixelsTower(
            hidden_size=width,
            num_layers=0,
            num_heads=1,
            inner=0,
            patch_size=vision.integer("patch_size", 16),
            merge_size=merge_size,
            activation="gelu",
            most_patches=MOST_SOFT_TOKENS * merge_size**2,
            longest_side=merge_size * vision.integer("mm_posemb_size", 1120),
            eps=vision.number("rms_norm_eps", 1e-6),
        ),
        both_ways=fields.values.get("use_bidirectional_attention") == "vision",
        merge_size=merge_size,
        video=VideoSpec(
            token=read_item_token(fields, ("video_token_id",), 258_884, vocab_size),
            processors=("Gemma4UnifiedVideoProcessor",),
            in_one_piece=False,
        ),
    )


def _read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    audio = fields.whole.section("audio_config", "gemma4_unified_audio")
    if audio is None:
        return None
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), 258_881, vocab_size),
        tower=SamplesTower(
            num_mels=audio.integer("audio_embed_dim", 640),
            eps=audio.number("rms_norm_eps", 1e-6),
        ),
    )
