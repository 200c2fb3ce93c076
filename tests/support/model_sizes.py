"""The parameters of a model directory, counted without memory for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model


def num_allocated(directory: Path) -> int:
    """Return the number of elements that our model allocates."""
    counted = 0

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal counted
        made = torch.empty(shape, dtype=dtype, device="meta")
        counted += made.numel()
        return made

    create_model(ModelConfig.from_directory(directory), torch.bfloat16, allocate)
    return counted


def theirs_on_meta(directory: Path) -> Any:
    """Return the model of transformers, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
