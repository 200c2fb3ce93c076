"""Idefics 3 and SmolVLM: SigLIP, a projection of squares of patches, and Llama."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import llama
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_idefics3, read_item_token, vision_fields
from shmllm.models.vision.projected_specs import Idefics3Tower
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    config = llama.configure(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm")
    if vision is None:
        return None
    encoder = read_idefics3(vision)
    factor = fields.whole.integer("scale_factor", 2)
    if encoder.side % factor:
        raise fields.whole.error(
            f"scale_factor ({factor}) must divide the {encoder.side} patches of a row"
        )
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 128257, vocab_size),
        tower=Idefics3Tower(encoder=encoder, factor=factor),
        tile_embeddings=(encoder.side // factor) ** 2,
    )
