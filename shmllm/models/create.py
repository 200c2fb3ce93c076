"""Creates a model from its configuration."""

from __future__ import annotations

import torch

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.layers import Allocator, Storage
from shmllm.models.registry import find_family


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
        quantization: what the matrices of all matrix products are rounded to, one of
            `quantized.QUANTIZATIONS`; None: they are not.
    """
    storage = Storage(allocate, dtype, quantization)
    rename = getattr(find_family(config.architecture), "named_weights", None)
    return DecoderModel(config, storage, rename)
