"""The KV cache on a CPU: the keys and values of all layers, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.worker.arena import ALIGNMENT_BYTES, Arena
from shmllm.worker.memory import CacheShape
from shmllm_kernels.cpu.cache_layout import CacheLayout


def cache_bytes(layout: CacheLayout, shape: CacheShape, num_blocks: int) -> int:
    """Return the size of the arena that a `CpuKVCache` needs."""
    return shape.num_buffers * (num_blocks * layout.block_bytes + ALIGNMENT_BYTES)


class CpuKVCache:
    """The KV blocks of all layers.

    Args:
        layout: the layout of a block in one layer.
        shape: the groups of layers.
        num_blocks: the number of blocks.
        arena: the arena to allocate them in.

    Attributes:
        layout: as given.
        num_groups: the number of groups of layers.
        layers: for each layer the index of its group and its buffer, [num_blocks, block_bytes]
            uint8, zeroed. One layer of each group uses the same buffer, in blocks of their own.
    """

    def __init__(
        self, layout: CacheLayout, shape: CacheShape, num_blocks: int, arena: Arena
    ) -> None:
        self.layout = layout
        self.num_groups = len(shape.groups)
        size = (num_blocks, layout.block_bytes)
        buffers = [arena.allocate(size, torch.uint8) for _ in range(shape.num_buffers)]
        self.layers: list[tuple[int, Tensor]] = [
            (group, buffers[buffer]) for group, buffer in shape.places
        ]
