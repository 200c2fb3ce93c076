"""GLM-4.5V and 4.6V with experts: the tower and the positions of `glm4v`, and the layers of
`glm4_moe`."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import glm4_moe, glm4v
from shmllm.models.fields import Fields
from shmllm.models.vision.qwen_fields import ItemTokens, with_vision
from shmllm.models.vision.specs import VisionSpec

_DEFAULTS = {"attention_bias": True, "max_position_embeddings": 65_536}
VISION_TYPES = "glm4v_moe_vision", "glm4v_moe"
_TOKENS = ItemTokens(151_363, 151_364)


def configure(fields: Fields) -> ModelConfig:
    config = configure_text(fields)
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, glm4v.SECTIONS, mixes_axes=False)


def configure_text(fields: Fields) -> ModelConfig:
    """Returns the configuration of the language model."""
    if fields.flag("use_qk_norm", False):
        raise fields.error("use_qk_norm true is not supported; supported: false")
    return glm4_moe.configure(fields.with_defaults(_DEFAULTS))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return glm4v.read_vision(fields, config, VISION_TYPES, tokens=_TOKENS)
