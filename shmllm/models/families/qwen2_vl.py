"""Qwen 2 VL: an encoder for images of any size, and Qwen 2 with three axes.

Its positions are triples, see `qwen2_5_vl`; each frame of a video is one position on the axis of
time.
"""

from __future__ import annotations

from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import TOKENS, read_qwen_tower, read_video, with_vision
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Qwen2Tower

DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}
SECTIONS = (16, 24, 24)
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}


def configure(fields: Fields) -> ModelConfig:
    config = qwen2.configure(fields.with_defaults(DEFAULTS), num_kv_heads=8)
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, SECTIONS, mixes_axes=False)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``, in which
    ``hidden_size`` is the width of the embeddings and ``embed_dim`` that of the stream."""
    vision = vision_fields(fields, "qwen2_vl_vision", "qwen2_vl")
    if vision is None:
        return None
    shared = read_qwen_tower(
        vision, config.hidden_size, _VISION_DEFAULTS, width="embed_dim", output="hidden_size"
    )
    inner = shared["hidden_size"] * vision.integer("mlp_ratio", 4)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), TOKENS.image, config.vocab_size),
        tower=Qwen2Tower(**shared, inner=inner),
        merge_size=shared["merge_size"],
        has_axes=True,
        video=read_video(fields, ("Qwen2VLVideoProcessor",), config.vocab_size, in_one_piece=True),
    )
