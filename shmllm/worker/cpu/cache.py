"""The KV cache on a CPU: the keys and values of all layers, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.worker.arena import ALIGNMENT_BYTES, Arena
from shmllm.worker.memory import CacheShape
from shmllm_kernels.cpu.cache_layout import CacheLayout


def cache_bytes(
    layout: CacheLayout, shape: CacheShape, num_blocks: int, num_states: int = 1
) -> int:
    """Return the size of the arena that a `CpuKVCache` needs."""
    blocks = shape.num_buffers * (num_blocks * layout.block_bytes + ALIGNMENT_BYTES)
    states = num_states * shape.state_bytes + ALIGNMENT_BYTES
    return blocks + len(shape.state_layers) * states


class CpuKVCache:
    """The KV blocks of all layers.

    Args:
        layout: the layout of a block in one layer.
        shape: the groups of layers.
        num_blocks: the number of blocks of keys and values.
        arena: the arena to allocate them in.
        num_states: the number of blocks of states.

    Attributes:
        layout: as given.
        num_groups: the number of groups of layers.
        layers: for each layer with attention the index of its group and its buffer, [num_blocks,
            block_bytes] uint8, zeroed. One layer of each group uses the same buffer, in blocks of
            their own.
        states: for each layer with a state its buffer, [num_states, state_bytes] uint8.
        interval: the number of tokens of a block of states; 0: there are none.
        state_group: the index of the group of states; 0: there is none.
    """

    def __init__(
        self,
        layout: CacheLayout,
        shape: CacheShape,
        num_blocks: int,
        arena: Arena,
        num_states: int = 1,
    ) -> None:
        self.layout = layout
        self.num_groups = len(shape.groups)
        size = (num_blocks, layout.block_bytes)
        buffers = [arena.allocate(size, torch.uint8) for _ in range(shape.num_buffers)]
        self.layers: dict[int, tuple[int, Tensor]] = {
            layer: (group, buffers[buffer]) for layer, (group, buffer) in shape.places.items()
        }
        self.states: dict[int, Tensor] = {
            layer: arena.allocate((num_states, shape.state_bytes), torch.uint8)
            for layer in shape.state_layers
        }
        self.state_group, self.interval = shape.states or (0, 0)
