"""Falcon Mamba: Mamba with norms, without weights, of time steps' rank, B and C."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.mamba import FIELDS
from shmllm.models.families.mamba2 import configure_with, named_weights
from shmllm.models.fields import Fields
from shmllm.models.mamba_fields import read_mamba

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    eps = fields.number("mixer_rms_eps", 1e-6)
    return configure_with(fields, read_mamba(fields, FIELDS, "plain", eps), tied=True)
