"""GLM-4.1V: an encoder for images of any size, and GLM-4 with three axes.

Its positions are triples, see `qwen2_5_vl`.
"""

from __future__ import annotations

from typing import Any

from shmllm.models import glm4
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.glm4 import named_weights
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import read_qwen_tower, with_vision
from shmllm.models.vision.specs import Glm4vTower, VisionSpec

__all__ = ["configure", "named_weights", "read_tower", "read_vision"]

_DEFAULTS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
SECTIONS = (8, 12, 12)
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "num_heads": 12,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "hidden_act": "silu",
}


def configure(fields: Fields) -> ModelConfig:
    if not fields.flag("attention_bias", True):
        raise fields.error("attention_bias false is not supported; supported: true")
    config = glm4.configure(_with_head_dim(fields.with_defaults(_DEFAULTS)))
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, SECTIONS, mixes_axes=False)


def _with_head_dim(fields: Fields) -> Fields:
    """Returns the fields with the width of a head, which follows from other fields."""
    hidden_size, num_heads = (
        fields.integer(name) for name in ("hidden_size", "num_attention_heads")
    )
    head_dim = hidden_size // num_heads
    if (found := fields.integer("head_dim", head_dim)) != head_dim:
        raise fields.error(f"head_dim {found} is not supported; supported: {head_dim}")
    return fields.with_values(fields.values | {"head_dim": head_dim})


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return read_tower(fields, config, ("glm4v_vision", "glm4v"), image_token=151_343)


def read_tower(
    fields: Fields, config: ModelConfig, types: tuple[str, ...], *, image_token: int
) -> VisionSpec | None:
    """Returns what a model computes of images; None: it has no ``vision_config``, in which
    ``out_hidden_size`` is also the width of the MLPs of its layers, and ``intermediate_size`` that
    of the one behind them.

    Args:
        fields: the fields of the language model.
        config: what it is.
        types: the values that ``model_type`` of ``vision_config`` may have.
        image_token: the default of ``image_token_id``.
    """
    vision = vision_fields(fields, *types)
    if vision is None:
        return None
    shared = read_qwen_tower(vision, config.hidden_size, _VISION_DEFAULTS)
    image_size = vision.integer("image_size", 336, minimum=shared["patch_size"])
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), image_token, config.vocab_size),
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
    )
