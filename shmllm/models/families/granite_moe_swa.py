"""Granite with experts, an MLP that all tokens go to, and the attention of `granite_swa`."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.granite_moe import module_weights, named_weights
from shmllm.models.families.granite_moe_shared import configure as configure_with_experts
from shmllm.models.families.granite_swa import with_sinks
from shmllm.models.fields import Fields

__all__ = ["configure", "module_weights", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    return with_sinks(fields, configure_with_experts(fields))
