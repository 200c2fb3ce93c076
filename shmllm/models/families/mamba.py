"""Mamba: every layer is a mixer alone; there is neither attention nor an MLP."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.mamba2 import configure_with, named_weights
from shmllm.models.fields import Fields
from shmllm.models.mamba_fields import Names, read_mamba

__all__ = ["FIELDS", "configure", "named_weights"]

FIELDS: Names = {
    "width": ("intermediate_size", None),
    "state_size": ("state_size", 16),
    "rank": ("time_step_rank", "auto"),
    "taps": ("conv_kernel", 4),
    "bias": ("use_bias", False),
    "convolution_bias": ("use_conv_bias", True),
    "expand": ("expand", 2),
    "activation": ("hidden_act", "silu"),
}


def configure(fields: Fields) -> ModelConfig:
    return configure_with(fields, read_mamba(fields, FIELDS, None, 1e-6), tied=True)
