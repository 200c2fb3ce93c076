"""DeepSeek-VL 1.3B: SigLIP, two projections, and Llama."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import janus
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_siglip, vision_fields
from shmllm.models.vision.projected_specs import DeepseekVLTower
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    config = janus.read_text_model(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "siglip_vision_model")
    if vision is None:
        return None
    encoder = read_siglip(vision)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 100_015, vocab_size),
        tower=DeepseekVLTower(encoder=encoder, depth=2, activation="gelu"),
        tile_embeddings=encoder.side**2,
    )
