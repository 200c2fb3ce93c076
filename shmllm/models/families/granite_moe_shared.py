"""Granite with experts, and an MLP that all tokens go to."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.granite_moe import (
    configure_with,
    module_weights,
    named_weights,
    read_granite_experts,
)
from shmllm.models.fields import Fields
from shmllm.models.specs import MLPSpec

__all__ = ["configure", "module_weights", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    inner = fields.integer("shared_intermediate_size", 0, minimum=0)
    shared = MLPSpec(inner=inner) if inner else None
    return configure_with(fields, replace(read_granite_experts(fields), shared=shared))
