"""The KV cache on a GPU: the keys and values of all layers, or their states, at fixed addresses.

This module owns the layout. A block of a layer has its keys and behind them its values,
[block_size, kv heads, head_dim] each. docs/kernels.md has the reasons for that order.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import KVHeads
from shmllm.worker.arena import Arena, padded_bytes
from shmllm.worker.memory import CacheShape


def block_bytes(heads: KVHeads, block_size: int, dtype: torch.dtype) -> int:
    """Return the size of a block's keys and values in one layer.

    Args:
        heads: the layer's keys and values.
        block_size: tokens in a block.
        dtype: their dtype.
    """
    return block_size * heads.count * (heads.key_dim + heads.value_dim) * dtype.itemsize


def cache_bytes(shape: CacheShape, dtype: torch.dtype, num_blocks: int, num_states: int = 1) -> int:
    """Return the size of the arena that a `GpuKVCache` needs."""
    buffer = padded_bytes((num_blocks, shape.buffer_bytes), torch.uint8)
    states = padded_bytes((num_states, shape.state_bytes), torch.uint8)
    return shape.num_buffers * buffer + len(shape.state_layers) * states


class GpuKVCache:
    """The KV blocks of all layers.

    Args:
        model: the model's configuration.
        dtype: the dtype of keys and values.
        shape: the groups of layers.
        num_blocks: the number of blocks of keys and values.
        arena: the arena to allocate them in.
        num_states: the number of blocks of states.

    Attributes:
        layers: for each layer with attention the index of its group, its keys and its values,
            [num_blocks, block_size, kv heads, head_dim] each, zeroed; values that are the first
            elements of their keys have a head_dim of 0. Layers of different groups
            use the same memory, in blocks of their own. A layer that has no keys and values of its
            own has those of the layer that it reads.
        states: for each layer with a state its states, [num_states, elements] float32.
        interval: the number of tokens of a block of states; 0: there are none.
        state_group: the index of the group of states; 0: there is none.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        shape: CacheShape,
        num_blocks: int,
        arena: Arena,
        num_states: int = 1,
    ) -> None:
        size = (num_blocks, shape.buffer_bytes // dtype.itemsize)
        buffers = [arena.allocate(size, dtype) for _ in range(shape.num_buffers)]
        self.layers: dict[int, tuple[int, Tensor, Tensor]] = {}
        for layer, (group, buffer, part) in shape.places.items():
            heads = model.layer_kv[layer]
            assert heads is not None, "it has a place"
            own = block_bytes(heads, shape.block_size, dtype) // dtype.itemsize
            blocks = buffers[buffer][:, part * own : (part + 1) * own]
            self.layers[layer] = (group, *_keys_and_values(blocks, heads, shape.block_size))
        for layer, source in model.kv_sources.items():
            self.layers[layer] = self.layers[source]
        elements = shape.state_bytes // torch.float32.itemsize
        self.states: dict[int, Tensor] = {
            layer: arena.allocate((num_states, elements), torch.float32)
            for layer in shape.state_layers
        }
        self.state_group, self.interval = shape.states or (0, 0)

    def copy_state(self, source: int, target: int) -> None:
        """Copy a block of states to another, behind the steps that were launched before."""
        for states in self.states.values():
            states[target].copy_(states[source], non_blocking=True)


def _keys_and_values(blocks: Tensor, heads: KVHeads, block_size: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys and the values in a layer's blocks, [num_blocks, elements]."""
    of_keys = block_size, heads.count, heads.key_dim
    of_values = block_size, heads.count, heads.value_dim
    keys, values = blocks.split_with_sizes([prod(of_keys), prod(of_values)], dim=1)
    return keys.unflatten(1, of_keys), values.unflatten(1, of_values)
