"""Creates a model of the architecture that its config.json names."""

from __future__ import annotations

from importlib import import_module

import torch

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.layers import Allocator, Storage
from shmllm.models.registry import find_architecture


def create_model(
    config: ModelConfig,
    dtype: torch.dtype,
    allocate: Allocator,
    quantization: str | None = None,
) -> DecoderModel:
    """Builds a model whose weights are not set.

    Args:
        config: the model's sizes and options.
        dtype: the dtype of weights, keys and values.
        allocate: called once for each weight tensor, always in the same order. It may return
            meta tensors if the caller only needs their sizes.
        quantization: "int8" rounds the matrices of all matrix products to 8 bits.
    """
    module, _, name = find_architecture(config.architecture).target.partition(":")
    model_class: type[DecoderModel] = getattr(import_module(module), name)
    return model_class(config, Storage(allocate, dtype, rounds=quantization == "int8"))
