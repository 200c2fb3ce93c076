"""Gives the weights of a module memory from an allocator.

Weights are the parameters, and the buffers that checkpoints have if they are floating numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from shmllm.models.layers import Allocator


def weights_of(module: Any) -> dict[str, Tensor]:
    """Returns the weights by their first name, in the order in which they get memory."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and buffer.is_floating_point():
                found[f"{path}.{name}" if path else name] = buffer
    return found


def give_memory(module: Any, allocate: Allocator) -> dict[str, Tensor]:
    """Puts all weights into memory of an allocator: parameters as it returns it, buffers with their
    values. What else the module has moves to the same device.

    Returns:
        The weights, by name.
    """
    stored: dict[str, Tensor] = {}
    of_weight: dict[int, Tensor] = {}
    for name, weight in weights_of(module).items():
        memory = allocate(tuple(weight.shape), weight.dtype)
        if not weight.is_meta:
            memory.copy_(weight)
        stored[name] = memory
        if isinstance(weight, nn.Parameter):
            memory = nn.Parameter(memory, requires_grad=False)
        of_weight[id(weight)] = memory
    device = next(iter(stored.values())).device
    for child in module.modules():
        _put(child, of_weight, device)
    return stored


def count_memory(module: Any, allocate: Allocator) -> None:
    """Calls an allocator as `give_memory` will."""
    for weight in weights_of(module).values():
        allocate(tuple(weight.shape), weight.dtype)


def _put(child: nn.Module, of_weight: dict[int, Tensor], device: torch.device) -> None:
    for name, parameter in child._parameters.items():
        if parameter is not None:
            child._parameters[name] = cast(nn.Parameter, of_weight[id(parameter)])
    for name, buffer in child._buffers.items():
        if buffer is not None:
            child._buffers[name] = of_weight.get(id(buffer), buffer.to(device))
