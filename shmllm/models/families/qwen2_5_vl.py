"""Qwen 2.5 VL: an encoder with windows for images of any size, and Qwen 2 with three axes.

Its positions are triples, of time, height and width. Those of text are three equal numbers.
"""

from __future__ import annotations

from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2, qwen2_vl
from shmllm.models.fields import Fields
from shmllm.models.rope_config import VideoTimes
from shmllm.models.vision.fields import read_item_token, read_layer_indices, vision_fields
from shmllm.models.vision.qwen_fields import TOKENS, read_qwen_tower, read_video, with_vision
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Qwen2_5Tower

_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "hidden_act": "silu",
}
_FULL_LAYERS = (7, 15, 23, 31)


def configure(fields: Fields) -> ModelConfig:
    config = qwen2.configure(fields.with_defaults(qwen2_vl.DEFAULTS), num_kv_heads=8)
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, qwen2_vl.SECTIONS, mixes_axes=False)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "qwen2_5_vl_vision", "qwen2_5_vl")
    if vision is None:
        return None
    tower = read_tower(vision, config.hidden_size)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), TOKENS.image, config.vocab_size),
        tower=tower,
        merge_size=tower.merge_size,
        has_axes=True,
        video=read_video(
            fields,
            ("Qwen2VLVideoProcessor",),
            config.vocab_size,
            in_one_piece=True,
            times=VideoTimes(vision.number("tokens_per_second", 4)),
        ),
    )


def read_tower(vision: Fields, hidden_size: int, num_kv_heads: int = 0) -> Qwen2_5Tower:
    """Returns the tower that a ``vision_config`` describes.

    Args:
        vision: its fields.
        hidden_size: the width of the language model's embeddings.
        num_kv_heads: see `Qwen2_5Tower`.
    """
    shared = read_qwen_tower(vision, hidden_size, _VISION_DEFAULTS)
    square = shared["patch_size"] * shared["merge_size"]
    return Qwen2_5Tower(
        **shared,
        inner=vision.integer("intermediate_size", 3420),
        num_kv_heads=num_kv_heads,
        window=vision.integer("window_size", 112, minimum=square) // square,
        full_layers=read_layer_indices(
            vision, "fullatt_block_indexes", _FULL_LAYERS, shared["num_layers"]
        ),
    )
