"""The KV cache on a CPU: the keys and values of all layers, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.worker.arena import ALIGNMENT_BYTES, Arena
from shmllm_kernels.cpu.cache_layout import CacheLayout


def cache_bytes(layout: CacheLayout, num_layers: int, num_blocks: int) -> int:
    """Return the size of the arena that a `CpuKVCache` needs."""
    return num_layers * (num_blocks * layout.block_bytes + ALIGNMENT_BYTES)


class CpuKVCache:
    """The KV blocks of all layers.

    Args:
        layout: the layout of a block in one layer.
        num_layers: the number of layers.
        num_blocks: the number of blocks.
        arena: the arena to allocate them in.

    Attributes:
        layout: as given.
        layers: one tensor for each layer, [num_blocks, block_bytes] uint8, zeroed.
    """

    def __init__(self, layout: CacheLayout, num_layers: int, num_blocks: int, arena: Arena) -> None:
        self.layout = layout
        shape = (num_blocks, layout.block_bytes)
        self.layers: list[Tensor] = [arena.allocate(shape, torch.uint8) for _ in range(num_layers)]
