"""GLM-4.1V: an encoder for images of any size, and GLM-4 with three axes.

Its positions are triples, see `qwen2_5_vl`. The embeddings of videos, too, take the place of those
of image tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import glm4
from shmllm.models.families.glm4 import named_weights
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import (
    ItemTokens,
    read_qwen_tower,
    read_video,
    with_vision,
)
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Glm4vTower

__all__ = ["configure", "named_weights", "read_vision"]

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}
SECTIONS = (8, 12, 12)
TOKENS = ItemTokens(151_343, 151_344)
PROCESSORS = "Glm4vVideoProcessor", "Glm46VVideoProcessor"
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "num_heads": 12,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "hidden_act": "silu",
}


def configure(fields: Fields) -> ModelConfig:
    config = configure_text(fields)
    return with_vision(config, fields, read_vision(fields, config), SECTIONS, mixes_axes=False)


def configure_text(fields: Fields) -> ModelConfig:
    """Returns the configuration of the language model."""
    if not fields.flag("attention_bias", True):
        raise fields.error("attention_bias false is not supported; supported: true")
    return glm4.configure(_with_head_dim(fields.with_defaults(_DEFAULTS)))


def _with_head_dim(fields: Fields) -> Fields:
    """Returns the fields with the width of a head, which follows from other fields."""
    hidden_size, num_heads = (
        fields.integer(name) for name in ("hidden_size", "num_attention_heads")
    )
    head_dim = hidden_size // num_heads
    if (found := fields.integer("head_dim", head_dim)) != head_dim:
        raise fields.error(f"head_dim {found} is not supported; supported: {head_dim}")
    return fields.with_values(fields.values | {"head_dim": head_dim})


def read_vision(
    fields: Fields,
    config: ModelConfig,
    model_types: tuple[str, ...] = ("glm4v_vision", "glm4v"),
    *,
    tokens: ItemTokens = TOKENS,
    processors: tuple[str, ...] = PROCESSORS,
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``, in which
    ``out_hidden_size`` is also the width of the MLPs of its layers, and ``intermediate_size`` that
    of the one behind them.

    Args:
        fields: what `configure` got.
        config: that of the language model.
        model_types: what ``model_type`` of ``vision_config`` may be.
        tokens: the defaults of the tokens of images and videos.
        processors: see `VideoSpec`.
    """
    vision = vision_fields(fields, *model_types)
    if vision is None:
        return None
    shared = read_qwen_tower(vision, config.hidden_size, _VISION_DEFAULTS)
    image_size = vision.integer("image_size", 336, minimum=shared["patch_size"])
    token = read_item_token(fields, ("image_token_id",), tokens.image, config.vocab_size)
    video = read_video(fields, processors, config.vocab_size, in_one_piece=False, tokens=tokens)
    return VisionSpec(
        image_token=token,
        tower=Glm4vTower(
            **shared,
            inner=config.hidden_size,
            num_positions=(image_size // shared["patch_size"]) ** 2,
            attention_bias=vision.flag("attention_bias", False),
            eps=vision.number("rms_norm_eps", 1e-5),
            merger_inner=vision.integer("intermediate_size", 13696),
        ),
        merge_size=shared["merge_size"],
        has_axes=True,
        video=video and replace(video, token=token),
    )
