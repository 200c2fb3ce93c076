"""The towers of Gemma 4 for images and sounds, as the fields of config.json describe them."""

from __future__ import annotations

from typing import Any

from shmllm.models.audio.specs import AudioSpec, Gemma4AudioTower
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_item_token,
    read_num_heads,
    read_theta,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.specs import VideoSpec, VisionSpec
from shmllm.models.vision.squares_specs import Gemma4Tower

MOST_SOFT_TOKENS = 1120
"""The most embeddings of an image, or of a frame, that transformers' processors allow."""
MOST_FRAMES = 2999
"""The frames of the longest sound: 30 seconds."""


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "gemma4_vision")
    if vision is None:
        return None
    check_choice(vision, "attention_bias", False)
    num_heads = vision.integer("num_attention_heads", 12)
    num_kv_heads = vision.integer("num_key_value_heads", 12)
    if num_heads % num_kv_heads:
        raise vision.error(
            f"num_key_value_heads ({num_kv_heads}) must divide num_attention_heads ({num_heads})"
        )
    head_dim = vision.integer("head_dim", 64)
    check_rotated_heads(vision, head_dim)
    merge_size = vision.integer("pooling_kernel_size", 3)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 258_880, vocab_size),
        tower=Gemma4Tower(
            hidden_size=vision.integer("hidden_size", 768),
            num_layers=vision.integer("num_hidden_layers", 16, maximum=MOST_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            inner=vision.integer("intermediate_size", 3072),
            patch_size=vision.integer("patch_size", 16),
            merge_size=merge_size,
            activation=read_vision_activation(vision, "hidden_activation", "gelu_pytorch_tanh"),
            theta=read_theta(vision, default=100.0),
            eps=vision.number("rms_norm_eps", 1e-6),
            clips=vision.flag("use_clipped_linears", False),
            standardizes=vision.flag("standardize", False),
            most_patches=MOST_SOFT_TOKENS * merge_size**2,
            longest_side=vision.integer("position_embedding_size", 10_240),
        ),
        both_ways=fields.values.get("use_bidirectional_attention") == "vision",
        merge_size=merge_size,
        video=VideoSpec(
            token=read_item_token(fields, ("video_token_id",), 258_884, vocab_size),
            processors=("Gemma4VideoProcessor",),
            in_one_piece=False,
        ),
    )


def read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``, or the tokens of
    its images attend both ways, which those of sounds do not."""
    if fields.values.get("use_bidirectional_attention") is not None:
        return None
    audio = fields.whole.section("audio_config", "gemma4_audio")
    if audio is None:
        return None
    masked: Any = audio.values.get("attention_invalid_logits_value", -1e9)
    if type(masked) not in (int, float) or not masked <= -1e4:
        raise audio.error(f"attention_invalid_logits_value must be below -10,000, not {masked!r}")
    hidden_size = audio.integer("hidden_size", 1024)
    channels = audio.values.get("subsampling_conv_channels", [128, 32])
    if not isinstance(channels, list) or len(channels) != 2:
        raise audio.error(f"'subsampling_conv_channels' must be two integers, not {channels!r}")
    first, second = (
        Fields({"subsampling_conv_channels": each}, audio.where).integer(
            "subsampling_conv_channels", minimum=least
        )
        for each, least in zip(channels, (4, 1), strict=True)
    )
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), 258_881, vocab_size),
        tower=Gemma4AudioTower(
            hidden_size=hidden_size,
            num_layers=audio.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
            num_heads=read_num_heads(audio, "num_attention_heads", 8, hidden_size),
            activation=read_vision_activation(audio, "hidden_act", "silu"),
            channels=(first, second),
            kernel=audio.integer("conv_kernel_size", 5),
            chunk=audio.integer("attention_chunk_size", 12),
            before=audio.integer("attention_context_left", 13, minimum=2),
            behind=audio.integer("attention_context_right", 0, minimum=0),
            cap=audio.number("attention_logit_cap", 50.0),
            residual_scale=audio.number("residual_weight", 0.5),
            bound=audio.number("gradient_clipping", 1e10),
            eps=audio.number("rms_norm_eps", 1e-6),
            clips=audio.flag("use_clipped_linears", True),
            adapted=audio.integer("output_proj_dims", 1536),
            most_frames=MOST_FRAMES,
        ),
    )
