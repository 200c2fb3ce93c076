"""ColModernVBERT: SigLIP, ModernBERT and a projection of each token, for late interaction with
pages (Teiletche et al., "ModernVBERT", 2025)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import modernbert
from shmllm.models.families.colqwen2 import with_projection
from shmllm.models.families.modernbert import named_weights
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_siglip, vision_fields
from shmllm.models.vision.projected_specs import Idefics3Tower
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "named_weights", "read_vision"]


def configure(fields: Fields) -> ModelConfig:
    model = modernbert.configure(fields)
    model = replace(model, vision=read_vision(fields, model.vocab_size))
    return with_projection(model, fields)


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, "siglip_vision_model"), fields.whole
    if vision is None:
        return None
    encoder, factor = read_siglip(vision), whole.integer("pixel_shuffle_factor", 4)
    if encoder.side % factor:
        raise whole.error(
            f"pixel_shuffle_factor ({factor}) must divide the {encoder.side} patches of a row"
        )
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 50_407, vocab_size),
        tower=Idefics3Tower(
            encoder=encoder, factor=factor, projection="connector.modality_projection"
        ),
        tile_embeddings=(encoder.side // factor) ** 2,
    )
