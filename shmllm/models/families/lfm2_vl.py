"""LFM2-VL: SigLIP 2 for images of any size, a projection of squares of patches, and LFM2."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from shmllm.models.config import ModelConfig
from shmllm.models.families import lfm2
from shmllm.models.families.lfm2 import named_weights
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_side,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Lfm2VlTower

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
    hidden_size = vision.integer("hidden_size", 768)
    num_positions = vision.integer("num_patches", 256)
    if isqrt(num_positions) ** 2 != num_positions:
        raise vision.error(f"num_patches ({num_positions}) must be a square number")
    merge_size = whole.integer("downsample_factor", 2)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 396, vocab_size),
        tower=Lfm2VlTower(
            hidden_size=hidden_size,
            num_layers=vision.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
            num_heads=read_num_heads(vision, "num_attention_heads", 12, hidden_size),
            inner=vision.integer("intermediate_size", 3072),
            patch_size=read_side(vision, "patch_size", 16),
            merge_size=merge_size,
            activation=read_vision_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            num_positions=num_positions,
            eps=vision.number("layer_norm_eps", 1e-6),
            projector_norm=whole.flag("projector_use_layernorm", True),
            projector_inner=whole.integer("projector_hidden_size", 2560),
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
            projector_bias=whole.flag("projector_bias", True),
        ),
        merge_size=merge_size,
    )
