"""GLM-4-9B of 2024: GLM-4 with norms before attention and MLP alone."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.glm4 import configure as configure_glm4
from shmllm.models.families.glm4 import named_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import PRE_NORMS

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    model = configure_glm4(fields)
    return replace(model, layers=tuple(replace(each, norms=PRE_NORMS) for each in model.layers))
