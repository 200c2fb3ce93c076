"""Kimi-VL: the same as `kimi_k25`, with other names of the projections."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import deepseek_v3, kimi_k25
from shmllm.models.fields import Fields
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    config = deepseek_v3.configure(fields)
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return kimi_k25.read_vision(fields, config, is_k25=False)
