"""Aya Vision: SigLIP, a norm and two projections of squares of patches, and Cohere or Cohere 2.

Logits have the factor that the language model has by itself: transformers 5.24 leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import cohere, cohere2
from shmllm.models.fields import Fields
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import (
    read_feature_layer,
    read_item_token,
    read_siglip,
    vision_fields,
)
from shmllm.models.vision.projected_specs import AyaVisionTower
from shmllm.models.vision.specs import VisionSpec

IMAGE_TOKEN = 255_036
SIGLIP = "siglip_vision_model"
_FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "cohere2": cohere2.configure,
    "cohere": cohere.configure,
}
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
}
_TIED = "tie_word_embeddings"


def configure(fields: Fields) -> ModelConfig:
    config = read_text_model(fields)
    return replace(config, vision=read_vision(fields, config))


def read_text_model(fields: Fields) -> ModelConfig:
    """Returns the configuration of the language model. The whole model says whether its LM head is
    the embedding table."""
    tied = {_TIED: fields.whole.flag(_TIED, True)}
    text = fields.with_defaults(_TEXT_DEFAULTS)
    return _FAMILIES[text.text("model_type", "cohere2")](text.with_values(text.values | tied))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, SIGLIP), fields.whole
    if vision is None:
        return None
    if (strategy := whole.text("vision_feature_select_strategy", "full")) != "full":
        raise whole.error(
            f"vision_feature_select_strategy {strategy!r} is not supported; supported: full"
        )
    encoder = read_siglip(vision)
    num_layers = read_feature_layer(whole, encoder.num_layers, -1)
    spec = read_tower(
        whole, replace(encoder, num_layers=num_layers, final_norm=False), config.hidden_size
    )
    tower = replace(
        spec, num_stored=encoder.num_layers, norm_eps=whole.number("adapter_layer_norm_eps", 1e-6)
    )
    names = "image_token_index", "image_token_id"
    return vision_spec(read_item_token(fields, names, IMAGE_TOKEN, config.vocab_size), tower)


def read_tower(whole: Fields, encoder: EncoderSpec, inner: int) -> AyaVisionTower:
    """Returns a tower without a norm between its encoder and its projections.

    Args:
        whole: the fields around ``vision_config``.
        encoder: the encoder.
        inner: the meaning of ``alignment_intermediate_size`` where it is absent.
    """
    factor = whole.integer("downsample_factor", 2)
    if encoder.side % factor:
        raise whole.error(
            f"downsample_factor ({factor}) must divide the {encoder.side} patches of a row"
        )
    found = whole.integer("alignment_intermediate_size", inner)
    if found % 2:
        raise whole.error(f"alignment_intermediate_size ({found}) must be even")
    return AyaVisionTower(
        encoder=encoder,
        num_stored=encoder.num_layers,
        factor=factor,
        norm_eps=None,
        inner=found // 2,
    )


def vision_spec(image_token: int, tower: AyaVisionTower) -> VisionSpec:
    """Returns what a model computes of images, by its tower."""
    side = tower.encoder.side // tower.factor
    return VisionSpec(image_token=image_token, tower=tower, tile_embeddings=side**2)
