"""Creates a model from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.layers import Allocator, Storage
from shmllm.models.matrices import Part
from shmllm.models.registry import find_family


def create_model(
    config: ModelConfig,
    dtype: torch.dtype,
    allocate: Allocator,
    quantization: str | None = None,
    stored: Sequence[Sequence[Part]] | None = None,
) -> DecoderModel:
    """Builds a model whose weights are not set.

    Args:
        config: the model's sizes and options.
        dtype: the dtype of weights, keys and values.
        allocate: called once for each weight tensor, always in the same order. It may return
            meta tensors if the caller only needs their sizes.
        quantization: what the matrices of all matrix products are rounded to, one of
            `matrices.QUANTIZATIONS`; None: they are not.
        stored: what `stored_parts` returned, if the checkpoint stores matrices packed.
    """
    parts = None if stored is None else iter(stored)
    return _create(config, Storage(allocate, dtype, quantization, parts))


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
    made: list[Tensor] = []
    model = _create(config, Storage(_Addresses().allocate, torch.float32, made=made))
    destinations = model.destinations()
    packed = {}
    for name, kind in kinds.items():
        for view in destinations.get(name, ()):
            if isinstance(view, Tensor):  # else its rows are not neighbours: they become floats
                packed[int(view.storage_offset())] = view.numel(), kind
    return [_parts(matrix, packed) for matrix in made]


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


def _create(config: ModelConfig, storage: Storage) -> DecoderModel:
    family = find_family(config.architecture)
    renames = (getattr(family, name, None) for name in ("named_weights", "module_weights"))
    return DecoderModel(config, storage, *renames)


class _Addresses:
    """Gives tensors addresses, but no memory."""

    def __init__(self) -> None:
        self._memory = torch.empty(2**48, device="meta")
        self._end = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, self._end = self._end, self._end + prod(shape)
        return self._memory[begin : self._end].view(shape)
