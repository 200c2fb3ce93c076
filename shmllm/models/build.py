"""Builds the decoder of a family, with memory for its weights or without.

This module must not know what the weights are, nor where they come from.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from shmllm.models.block_model import BlockModel
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.draft_specs import BlockSpec, EagleSpec, MedusaSpec
from shmllm.models.eagle_model import EagleModel
from shmllm.models.layers import Allocation, Storage
from shmllm.models.medusa_model import MedusaModel
from shmllm.models.registry import find_family

MODELS: dict[type, type[DecoderModel]] = {
    type(None): DecoderModel,
    EagleSpec: EagleModel,
    BlockSpec: BlockModel,
    MedusaSpec: MedusaModel,
}
"""The classes of models by what they read of other ones."""


def build(config: ModelConfig, storage: Storage) -> DecoderModel:
    """Builds a model whose weights are not set."""
    family = find_family(config.architecture)
    names = "named_weights", "module_weights", "other_names"
    make = MODELS[type(config.drafting)]
    return make(config, storage, *(getattr(family, name, None) for name in names))


def without_memory(config: ModelConfig) -> tuple[DecoderModel, list[Allocation]]:
    """Builds a model whose weights have addresses, but no memory: all are views of one meta tensor,
    in which they lie one behind the other. Returns its weights, too, as they were allocated."""
    made: list[Allocation] = []
    return build(
        config, Storage(_Addresses().allocate, torch.float32, made=made, has_all=True)
    ), made


class _Addresses:
    """Gives tensors addresses, but no memory."""

    def __init__(self) -> None:
        self._memory = torch.empty(2**48, device="meta")
        self._end = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, self._end = self._end, self._end + prod(shape)
        return self._memory[begin : self._end].view(shape)
