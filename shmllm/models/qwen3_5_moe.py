"""The language model of Qwen 3.5 and 3.6 with experts, and an MLP with a gate that all tokens go
to."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.qwen2_moe import read_experts_and_shared
from shmllm.models.qwen3_5 import configure_with


def configure(fields: Fields) -> ModelConfig:
    experts = read_experts_and_shared(
        fields, inner=512, shared_inner=512, num_experts=256, top_k=8, renormalize=True
    )
    return configure_with(fields, experts)
