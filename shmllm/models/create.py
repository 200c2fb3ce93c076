"""Creates a model from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shmllm.models.build import build, without_memory
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.layers import Allocation, Allocator, Storage
from shmllm.models.shard_weights import find_division
from shmllm.models.stored_matrix import Part


def create_model(
    config: ModelConfig,
    dtype: torch.dtype,
    allocate: Allocator,
    quantization: str | None = None,
    stored: Sequence[Sequence[Part]] | None = None,
) -> DecoderModel:
    """Builds a model whose weights are not set.

    Args:
        config: the model's sizes and options, or those of a rank's part of a model.
        dtype: the dtype of weights, keys and values.
        allocate: called once for each weight tensor, always in the same order.
        quantization: what the matrices of all matrix products are rounded to, one of
            `matrices.QUANTIZATIONS`; None: they are not.
        stored: what `stored_parts` returned, if the checkpoint stores matrices packed.
    """
    model, made = allocate_model(config, dtype, allocate, quantization, stored)
    if config.whole is not None:
        copy = model.embedding.copied_head  # not in the division, which rounds nothing
        matrices = [each.weight for each in made if each.is_matrix and each.weight is not copy]
        model.divide(find_division(config.whole, config), matrices)
    return model


def allocate_model(
    config: ModelConfig,
    dtype: torch.dtype,
    allocate: Allocator,
    quantization: str | None = None,
    stored: Sequence[Sequence[Part]] | None = None,
) -> tuple[DecoderModel, list[Allocation]]:
    """Allocates what `create_model` allocates, for a caller who only needs the sizes: `allocate`
    may return meta tensors. A rank's model does not know yet which part it is.

    Returns:
        The model, and its weights in the order of their allocation.
    """
    parts = None if stored is None else iter(stored)
    made: list[Allocation] = []
    return build(config, Storage(allocate, dtype, quantization, parts, made)), made


def stored_parts(config: ModelConfig, kinds: Mapping[str, str]) -> list[tuple[Part, ...]] | None:
    """Returns how a checkpoint stores each matrix of a model.

    It builds the model without memory and looks where each tensor of the checkpoint goes.

    Args:
        config: the model's sizes and options.
        kinds: the formats (`matrices.FORMATS`) of those tensors that are packed, by the names in
            `DecoderModel.destinations`.

    Returns:
        The parts of each matrix, in the order in which `create_model` allocates them; None if no
        tensor is packed.
    """
    if not kinds:
        return None
    model, made = without_memory(config)
    destinations = model.destinations()
    packed = {}
    for name, kind in kinds.items():
        for view in destinations.get(name, ()):
            if isinstance(view, Tensor):  # else its rows are not neighbours: they become floats
                packed[int(view.storage_offset())] = view.numel(), kind
    matrices = [each.weight for each in made if each.is_matrix]
    return [_parts(matrix, packed) for matrix in matrices if isinstance(matrix, Tensor)]


def _parts(matrix: Tensor, packed: Mapping[int, tuple[int, str]]) -> tuple[Part, ...]:
    begin, width = int(matrix.storage_offset()), matrix.shape[-1]
    end = begin + matrix.numel()
    parts: list[Part] = []
    for at in sorted(at for at in packed if begin <= at < end):
        count, kind = packed[at]
        parts += [Part((at - begin) // width, None)] if at > begin else []
        if parts and parts[-1].kind == kind:
            count += parts.pop().num_rows * width
        parts.append(Part(count // width, kind))
        begin = at + packed[at][0]
    if begin < end:
        parts.append(Part((end - begin) // width, None))
    if matrix.dim() > 2 and len(parts) > 1:  # the experts' kernels know one format
        return (Part(matrix.numel() // width, None),)
    return tuple(parts)
