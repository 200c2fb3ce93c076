"""Command A Vision: SigLIP, two projections of squares of patches, and Cohere 2. See
`aya_vision`."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.aya_vision import (
    IMAGE_TOKEN,
    SIGLIP,
    read_text_model,
    read_tower,
    vision_spec,
)
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_siglip, vision_fields
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    config = read_text_model(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, SIGLIP)
    if vision is None:
        return None
    tower = read_tower(fields.whole, read_siglip(vision), 36_864)
    return vision_spec(read_item_token(fields, ("image_token_id",), IMAGE_TOKEN, vocab_size), tower)
