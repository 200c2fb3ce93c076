"""Keys and values of all layers on a CPU, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.worker.arena import ALIGNMENT_BYTES, Arena
from shmllm_kernels.cpu.cache_layout import CacheLayout


def cache_bytes(layout: CacheLayout, num_layers: int, num_blocks: int) -> int:
    """What an arena must have for a `CpuKVCache`."""
    return num_layers * (num_blocks * layout.block_bytes + ALIGNMENT_BYTES)


class CpuKVCache:
    """
    Args:
        layout: of a block in a layer.
        num_layers: of the model.
        num_blocks: of each layer.
        arena: to cut them from.

    Attributes:
        layers: [num_blocks, block_bytes] uint8 each, zeroed.
    """

    def __init__(self, layout: CacheLayout, num_layers: int, num_blocks: int, arena: Arena) -> None:
        self.layout = layout
        shape = (num_blocks, layout.block_bytes)
        self.layers: list[Tensor] = [arena.allocate(shape, torch.uint8) for _ in range(num_layers)]
