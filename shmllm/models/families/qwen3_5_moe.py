"""Qwen 3.5 and 3.6 with experts, and an MLP with a gate that all tokens go to; the rest is that of
`qwen3_5`."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_5
from shmllm.models.families.qwen2_moe import read_experts_and_shared
from shmllm.models.fields import Fields
from shmllm.models.vision.qwen_fields import with_vision
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    experts = read_experts_and_shared(
        fields, inner=512, shared_inner=512, num_experts=256, top_k=8, renormalize=True
    )
    config = qwen3_5.configure_with(fields, experts)
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, qwen3_5.SECTIONS, mixes_axes=True)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return qwen3_5.read_vision(fields, config, ("qwen3_5_moe_vision", "qwen3_5_moe"))
