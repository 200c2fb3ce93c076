"""Granite-Docling, which reads documents: SigLIP whose inner layers give levels of embeddings, too,
and Granite.

Images take the coarse path of its connector; the fine one, with four times as many embeddings, and
the router that chooses between them are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import granite
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_levels, read_siglip, vision_fields
from shmllm.models.vision.projected_specs import GraniteDoclingTower
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 133_800,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
}
_LEVELS = (3, 7, 10)


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, True)  # that of the language model does not count
    given = {"num_key_value_heads": 4} | fields.values | {_TIED: tied}  # null: one for each head
    config = granite.configure(fields.with_values(given).with_defaults(_DEFAULTS))
    return replace(
        config,
        vision=read_vision(fields, config),
        skipped_prefixes=("model.density_router.",),
    )


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "granite_docling_vision")
    if vision is None:
        return None
    encoder = read_siglip(vision.with_defaults({"image_size": 512}))
    if (width := vision.integer("out_hidden_size", 1024)) != config.hidden_size:
        raise vision.error(f"out_hidden_size ({width}) differs from {config.hidden_size}")
    if encoder.side % (factor := vision.integer("scale_factor", 4)):
        raise vision.error(
            f"scale_factor ({factor}) must divide the {encoder.side} patches of a row"
        )
    if config.hidden_size % 4:
        raise vision.error(f"out_hidden_size ({width}) must be a multiple of 4")
    layers = read_levels(vision, _LEVELS, encoder.num_layers, config.num_layers)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 100_337, config.vocab_size),
        tower=GraniteDoclingTower(encoder=encoder, factor=factor, level_layers=layers),
        tile_embeddings=(encoder.side // factor) ** 2,
        num_levels=len(layers),
    )
