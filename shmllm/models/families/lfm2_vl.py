"""LFM2-VL: SigLIP 2 for images of any size, a projection of squares of patches, and LFM2."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import lfm2
from shmllm.models.families.lfm2 import named_weights
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    read_item_token,
    read_siglip2,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.siglip2_specs import Lfm2VlTower
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "named_weights", "read_vision"]

_OLD, _TIED = "tie_embedding", "tie_word_embeddings"


def configure(fields: Fields) -> ModelConfig:
    whole = fields.whole
    tied = whole.flag(_OLD, whole.flag(_TIED, True))  # that of the language model does not count
    values = {name: value for name, value in fields.values.items() if name != _OLD}
    config = lfm2.configure(fields.with_values(values | {_TIED: tied}))
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, "siglip2_vision_model"), fields.whole
    if vision is None:
        return None
    if (layer := whole.values.get("vision_feature_layer")) not in (None, -1):
        raise whole.error(f"vision_feature_layer {layer!r} is not supported; supported: -1")
    merge_size = whole.integer("downsample_factor", 2)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 396, vocab_size),
        tower=Lfm2VlTower(
            **read_siglip2(vision),
            merge_size=merge_size,
            projector_norm=whole.flag("projector_use_layernorm", True),
            projector_inner=whole.integer("projector_hidden_size", 2560),
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
            projector_bias=whole.flag("projector_bias", True),
        ),
        merge_size=merge_size,
    )
