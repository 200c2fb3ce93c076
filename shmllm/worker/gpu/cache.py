"""The KV cache on a GPU: the keys and values of all layers, or their states, at fixed addresses.

This module owns the layout, [blocks, block_size, kv heads, head_dim], with separate tensors for
keys and values. docs/kernels.md has the reasons for that layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shmllm.models.config import ModelConfig
from shmllm.worker.arena import Arena, padded_bytes
from shmllm.worker.memory import CacheShape


@dataclass(frozen=True, slots=True)
class GpuCacheLayout:
    """The layout of the KV blocks in one layer.

    Attributes:
        num_kv_heads: the number of key-value heads.
        head_dim: elements in a head.
        block_size: tokens in a block.
        dtype: the dtype of keys and values.
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
        """The size of a block's keys and values in one layer, in bytes."""
        elements = self.block_size * self.num_kv_heads * self.head_dim
        return 2 * elements * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Return the shape of a layer's keys, which is that of its values, too."""
        return num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    def cache_bytes(self, num_buffers: int, num_blocks: int) -> int:
        """Return the size of the arena that a `GpuKVCache` needs."""
        return 2 * num_buffers * padded_bytes(self.shape(num_blocks), self.dtype)


def states_bytes(shape: CacheShape, num_states: int) -> int:
    """Return the size of the states in the arena of a `GpuKVCache`."""
    return len(shape.state_layers) * padded_bytes((num_states, shape.state_bytes), torch.uint8)


class GpuKVCache:
    """The KV blocks of all layers.

    Args:
        layout: the layout of the blocks in one layer.
        shape: the groups of layers.
        num_blocks: the number of blocks of keys and values.
        arena: the arena to allocate them in.
        num_states: the number of blocks of states.

    Attributes:
        layout: as given.
        layers: for each layer with attention the index of its group, its keys and its values,
            zeroed; see `GpuCacheLayout.shape`. One layer of each group uses the same tensors, in
            blocks of their own.
        states: for each layer with a state its states, [num_states, elements] float32.
        interval: the number of tokens of a block of states; 0: there are none.
        state_group: the index of the group of states; 0: there is none.
    """

    def __init__(
        self,
        layout: GpuCacheLayout,
        shape: CacheShape,
        num_blocks: int,
        arena: Arena,
        num_states: int = 1,
    ) -> None:
        self.layout = layout
        size, dtype = layout.shape(num_blocks), layout.dtype
        buffers = [
            (arena.allocate(size, dtype), arena.allocate(size, dtype))
            for _ in range(shape.num_buffers)
        ]
        self.layers = {
            layer: (group, *buffers[buffer]) for layer, (group, buffer) in shape.places.items()
        }
        elements = shape.state_bytes // torch.float32.itemsize
        self.states: dict[int, torch.Tensor] = {
            layer: arena.allocate((num_states, elements), torch.float32)
            for layer in shape.state_layers
        }
        self.state_group, self.interval = shape.states or (0, 0)
