"""EXAONE 4.5: the tower of Qwen 2.5 VL with fewer key heads, and EXAONE 4, whose positions count on
through images and videos."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import exaone4
from shmllm.models.families.qwen2_5_vl import read_tower
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import ItemTokens, read_video
from shmllm.models.vision.specs import VisionSpec

_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""What files leave out of ``text_config``."""
_TOKENS = ItemTokens(67, 68)


def configure(fields: Fields) -> ModelConfig:
    config = exaone4.configure(fields.with_defaults(_TEXT_DEFAULTS))
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "exaone4_5_vision")
    if vision is None:
        return None
    num_kv_heads = vision.integer("num_key_value_heads", 8)
    tower = read_tower(vision, config.hidden_size, num_kv_heads)
    if tower.num_heads % num_kv_heads:
        raise vision.error(
            f"num_key_value_heads ({num_kv_heads}) must divide num_heads ({tower.num_heads})"
        )
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), _TOKENS.image, config.vocab_size),
        tower=tower,
        merge_size=tower.merge_size,
        video=read_video(
            fields,
            ("Qwen2VLVideoProcessor",),
            config.vocab_size,
            in_one_piece=True,
            tokens=_TOKENS,
        ),
    )
