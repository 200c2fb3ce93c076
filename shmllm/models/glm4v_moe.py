"""GLM-4.5V and 4.6V: GLM-4.1V's encoder, and GLM-4.5 with three axes."""

from __future__ import annotations

from shmllm.models import glm4_moe
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.glm4v import SECTIONS, read_tower
from shmllm.models.vision.qwen_fields import with_vision
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "read_vision"]

_DEFAULTS = {"attention_bias": True, "max_position_embeddings": 65536}


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_qk_norm", False):
        raise fields.error("use_qk_norm true is not supported")
    config = glm4_moe.configure(fields.with_absent(_DEFAULTS))
    return with_vision(config, fields, read_vision(fields, config), SECTIONS, mixes_axes=False)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return read_tower(fields, config, ("glm4v_moe_vision", "glm4v_moe"), image_token=151_363)
