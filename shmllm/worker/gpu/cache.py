"""Keys and values of all layers on a GPU, at fixed addresses.

Owns their layout: [blocks, block_size, kv heads, head_dim], keys apart from values. Why that one
is written in docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shmllm.models.config import ModelConfig
from shmllm.worker.arena import Arena, padded_bytes


@dataclass(frozen=True, slots=True)
class GpuCacheLayout:
    """Of the blocks of one layer.

    Attributes:
        num_kv_heads: heads of keys and of values.
        head_dim: numbers in a head.
        block_size: tokens in a block.
        dtype: of the numbers.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> GpuCacheLayout:
        return cls(config.num_kv_heads, config.head_dim, block_size, dtype)

    @property
    def block_bytes(self) -> int:
        """Keys and values of a block, in one layer."""
        elements = self.block_size * self.num_kv_heads * self.head_dim
        return 2 * elements * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Of the keys of a layer, and of the values."""
        return num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    def cache_bytes(self, num_layers: int, num_blocks: int) -> int:
        """What an arena must have for a `GpuKVCache`."""
        return 2 * num_layers * padded_bytes(self.shape(num_blocks), self.dtype)


class GpuKVCache:
    """
    Args:
        layout: of a layer.
        num_layers: of the model.
        num_blocks: of each layer.
        arena: to cut them from.

    Attributes:
        layers: keys and values of each, zeroed.
    """

    def __init__(
        self, layout: GpuCacheLayout, num_layers: int, num_blocks: int, arena: Arena
    ) -> None:
        self.layout = layout
        shape, dtype = layout.shape(num_blocks), layout.dtype
        self.layers = [
            (arena.allocate(shape, dtype), arena.allocate(shape, dtype)) for _ in range(num_layers)
        ]
