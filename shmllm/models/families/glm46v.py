"""GLM-4.6V: the tower and the positions of `glm4v`, and the language model of that family or of
`glm4v_moe`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families import glm4v, glm4v_moe
from shmllm.models.fields import Fields
from shmllm.models.vision.qwen_fields import with_vision
from shmllm.models.vision.specs import VisionSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_TEXTS: dict[str, Callable[[Fields], ModelConfig]] = {
    "glm4v_text": glm4v.configure_text,
    "glm4v_moe_text": glm4v_moe.configure_text,
}
_VISION_TYPES = "glm4v_vision", "glm4v", *glm4v_moe.VISION_TYPES


def configure(fields: Fields) -> ModelConfig:
    config = _TEXTS[fields.text("model_type", "glm4v_text")](fields)
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, glm4v.SECTIONS, mixes_axes=False)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return glm4v.read_vision(fields, config, _VISION_TYPES, processors=glm4v.PROCESSORS[::-1])


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return weights if config.mixtures else glm4v.named_weights(weights, config)
