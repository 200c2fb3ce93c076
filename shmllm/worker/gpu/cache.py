"""The KV cache on a GPU: the keys and values of all layers, or their states, at fixed addresses.

This module owns the layout. A block of a layer has its keys and behind them its values,
[block_size, kv heads, head_dim] each, or [kv heads, block_size, head_dim]: the table of tiles says
which. docs/kernels.md has the reasons for both. If values are narrower than keys, each value lies
behind its key, so that both have the same strides.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.entries import layer_entries
from shmllm.models.kv_heads import KVHeads
from shmllm.worker.arena import Arena, padded_bytes
from shmllm.worker.memory import CacheShape
from shmllm_kernels.gpu.configs import has_heads_first


def block_bytes(heads: KVHeads, block_size: int, dtype: torch.dtype) -> int:
    """Return the size of a block's keys and values in one layer.

    Args:
        heads: the layer's keys and values.
        block_size: tokens in a block.
        dtype: their dtype.
    """
    width = heads.count * (heads.key_dim + heads.value_dim) + heads.index_dim
    return rows_of(heads, block_size) * width * dtype.itemsize


def rows_of(heads: KVHeads, block_size: int) -> int:
    """Return the number of rows in a block of so many tokens."""
    return -(-block_size // heads.rate)


def cache_bytes(shape: CacheShape, dtype: torch.dtype, num_blocks: int, num_states: int = 1) -> int:
    """Return the size of the arena that a `GpuKVCache` needs."""
    buffer = padded_bytes((num_blocks, shape.buffer_bytes), torch.uint8)
    states = padded_bytes((num_states, shape.state_bytes), torch.uint8)
    return shape.num_buffers * buffer + len(shape.state_layers) * states


class GpuKVCache:
    """The KV blocks of all layers.

    Args:
        model: the model's configuration.
        dtype: the dtype of keys and values: the model's or FP8.
        shape: the groups of layers.
        num_blocks: the number of blocks of keys and values.
        arena: the arena to allocate them in.
        num_states: the number of blocks of states.

    Attributes:
        layers: for each layer with attention the index of its group, its keys and its values,
            [num_blocks, block_size, kv heads, width] each, in any order in memory, zeroed; in place
            of values that are the first elements of their keys it has the keys of an indexer, or a
            width of 0. Layers of
            different groups use the same memory, in blocks of their own. A layer that has no keys
            and values of its own has those of the layer that it reads.
        elements: all blocks of keys and values one behind the other, [elements].
        entries: for each layer with a compressed attention that has entries these, as in `layers`,
            with the keys of an indexer in place of values; a block has a row for each entry of its
            tokens.
        index_keys: for each layer with an indexer beside keys and values the indexer's keys,
            [num_blocks, block_size, index_dim].
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
        self._shape, self._dtype = shape, dtype
        self._blocks: Tensor | None = None
        self.elements = torch.empty(0, dtype=dtype)
        if shape.num_buffers:
            elements = shape.buffer_bytes // dtype.itemsize
            padded = padded_bytes((num_blocks, elements), dtype) // dtype.itemsize
            whole = arena.allocate((shape.num_buffers, padded), dtype)
            self.elements = whole.view(-1)
            self._blocks = whole[:, : num_blocks * elements].unflatten(1, (num_blocks, elements))
        self._buffers = [] if self._blocks is None else [*self._blocks]
        self.index_keys: dict[int, Tensor] = {}
        self.layers, self.entries = self._layers_of(model, 0), self._entries_of(model, 0)
        self._states: Tensor | None = None
        if shape.state_layers:
            elements = shape.state_bytes // torch.float32.itemsize
            sizes = len(shape.state_layers), num_states, elements
            self._states = arena.allocate(sizes, torch.float32)
        of_layers = () if self._states is None else self._states
        self.states: dict[int, Tensor] = dict(zip(shape.state_layers, of_layers, strict=True))
        self.state_group, self.interval = shape.states or (0, 0)

    @property
    def sections(self) -> tuple[Tensor | None, Tensor | None]:
        """The blocks of keys and values, and those of states, [num_blocks, buffers, integers] each,
        with gaps between a block's parts in the buffers; None: there are none."""
        blocks, states = (
            None if each is None else _as_integers(each).transpose(0, 1)
            for each in (self._blocks, self._states)
        )
        return blocks, states

    def of_draft(self, model: ModelConfig, first: int) -> GpuKVCache:
        """Return the cache as another model sees it, whose layers are those from index `first` on
        in the groups."""
        view = copy(self)
        view.index_keys = {}
        view.layers = self._layers_of(model, first)
        view.entries = self._entries_of(model, first)
        return view

    def _layers_of(self, model: ModelConfig, first: int) -> dict[int, tuple[int, Tensor, Tensor]]:
        shape = self._shape
        layers: dict[int, tuple[int, Tensor, Tensor]] = {}
        for layer, heads in enumerate(model.layer_kv):
            if heads is not None:
                group, blocks = self._blocks_of(first + layer, heads)
                if heads.value_dim and heads.index_dim:
                    index = blocks[:, blocks.shape[1] - shape.block_size * heads.index_dim :]
                    self.index_keys[layer] = index.unflatten(1, (shape.block_size, -1))
                    blocks = blocks[:, : -index.shape[1]]
                layers[layer] = (group, *_keys_and_values(blocks, heads, shape.block_size))
        for layer, source in model.kv_sources.items():
            layers[layer] = layers[source]
        return layers

    def _entries_of(self, model: ModelConfig, first: int) -> dict[int, tuple[int, Tensor, Tensor]]:
        entries = {}
        for layer, heads in enumerate(layer_entries(model), first + len(model.layer_kv)):
            if heads is not None:
                group, blocks = self._blocks_of(layer, heads)
                rows = rows_of(heads, self._shape.block_size)
                own = group, *_keys_and_values(blocks, heads, rows)
                entries[layer - first - len(model.layer_kv)] = own
        return entries

    def _blocks_of(self, layer: int, heads: KVHeads) -> tuple[int, Tensor]:
        """Return the group of a layer, by its index in all groups, and its blocks, [num_blocks,
        elements]."""
        shape, (group, buffer, part) = self._shape, self._shape.places[layer]
        own = block_bytes(heads, shape.block_size, self._dtype) // self._dtype.itemsize
        return group, self._buffers[buffer][:, part * own : (part + 1) * own]

    def copy_state(self, source: int, target: int) -> None:
        """Copy a block of states to another, behind the steps that were launched before."""
        for states in self.states.values():
            states[target].copy_(states[source], non_blocking=True)


def _as_integers(buffers: Tensor) -> Tensor:
    """Return the bits of [buffers, num_blocks, elements] as the largest integers that fit."""
    part_bytes = buffers.shape[2] * buffers.itemsize
    kinds = torch.int64, torch.int32, torch.int16, torch.uint8
    return buffers.view(next(kind for kind in kinds if part_bytes % kind.itemsize == 0))


def _keys_and_values(blocks: Tensor, heads: KVHeads, block_size: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys and the values, or the keys of an indexer, in a layer's blocks,
    [num_blocks, elements]."""
    tokens, sizes = block_size * heads.count, [heads.key_dim, heads.value_dim or heads.index_dim]
    heads_first = heads.count > 1 and has_heads_first(blocks.device, heads.key_dim)

    def in_order(part: Tensor) -> Tensor:
        width = part.shape[1] // tokens
        if heads_first:
            return part.view(len(part), heads.count, block_size, width).transpose(1, 2)
        return part.view(len(part), block_size, heads.count, width)

    if heads.value_dim not in (0, heads.key_dim):
        keys, values = in_order(blocks).split_with_sizes(sizes, dim=-1)
        return keys, values
    keys, values = blocks.split_with_sizes([tokens * size for size in sizes], dim=1)
    return in_order(keys), in_order(values)
