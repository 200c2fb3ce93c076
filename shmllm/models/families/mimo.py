"""MiMo 7B: Qwen 2 with layers that predict further tokens, which are not loaded."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.qwen2 import configure as configure_qwen2
from shmllm.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    return replace(configure_qwen2(fields), skipped_prefixes=("model.mtp_layers.",))
