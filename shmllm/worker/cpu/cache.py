"""The KV cache on a CPU: the keys and values of all layers, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.entries import layer_entries
from shmllm.models.kv_heads import KVHeads
from shmllm.worker.arena import ALIGNMENT_BYTES, Arena
from shmllm.worker.memory import CacheShape
from shmllm_kernels.cpu.cache_layout import IN_TILES, TILE_KEYS, CacheLayout, dtype_of
from shmllm_kernels.cpu.latent_layout import LatentLayout


def stored_as(dtype: str, block_size: int, uses_tiles: bool) -> str:
    """Return what keys and values are stored as: a dtype name, or IN_TILES, by which their layout
    and the kernels of attention are chosen.

    Args:
        dtype: the dtype name of the cache.
        block_size: tokens in a block.
        uses_tiles: whether products use AMX.
    """
    fits = dtype == dtype_of(IN_TILES) and block_size % TILE_KEYS == 0
    return IN_TILES if uses_tiles and fits else dtype


def layout_of(heads: KVHeads, block_size: int, stored: str) -> CacheLayout | LatentLayout:
    """Return the layout of a block in a layer.

    Args:
        heads: the layer's keys and values.
        block_size: tokens in a block.
        stored: what `stored_as` returned; latents are stored as a dtype.
    """
    if not heads.value_dim:
        rows = 1 << (-(-block_size // heads.rate) - 1).bit_length()
        return LatentLayout(heads.key_dim, rows, dtype_of(stored), heads.index_dim)
    widths = heads.value_dim, heads.index_dim
    return CacheLayout(heads.count, heads.key_dim, block_size, stored, *widths)


def cache_bytes(shape: CacheShape, num_blocks: int, num_states: int = 1) -> int:
    """Return the size of the arena that a `CpuKVCache` needs."""
    blocks = shape.num_buffers * (num_blocks * shape.buffer_bytes + ALIGNMENT_BYTES)
    states = num_states * shape.state_bytes + ALIGNMENT_BYTES
    return blocks + len(shape.state_layers) * states


class LayerCache(NamedTuple):
    """The keys and values of a layer.

    group: the index of its group of layers.
    blocks: [num_blocks, block_bytes] uint8, with other layers' blocks between them.
    layout: the layout of a block.
    """

    group: int
    blocks: Tensor
    layout: CacheLayout | LatentLayout


def head_layout(cache: LayerCache) -> CacheLayout:
    """Return the layout of a layer whose cache has values beside keys."""
    assert isinstance(cache.layout, CacheLayout), "the layer has latents"
    return cache.layout


def latent_layout(cache: LayerCache) -> LatentLayout:
    """Return the layout of a layer whose cache has latents."""
    assert isinstance(cache.layout, LatentLayout), "the layer has keys and values"
    return cache.layout


class CpuKVCache:
    """The KV blocks of all layers.

    Args:
        model: the model's configuration.
        stored: what keys and values are stored as, see `stored_as`.
        shape: the groups of layers.
        num_blocks: the number of blocks of keys and values.
        arena: the arena to allocate them in.
        num_states: the number of blocks of states.

    Attributes:
        stored: as given.
        num_groups: the number of groups of layers.
        layers: for each layer with attention its keys and values, zeroed. Layers of different
            groups use the same memory, in blocks of their own. A layer that has no keys and values
            of its own has those of the layer that it reads.
        entries: for each layer with a compressed attention that has entries these, likewise.
        states: for each layer with a state its buffer, [num_states, state_bytes] uint8.
        interval: the number of tokens of a block of states; 0: there are none.
        state_group: the index of the group of states; 0: there is none.
    """

    def __init__(
        self,
        model: ModelConfig,
        stored: str,
        shape: CacheShape,
        num_blocks: int,
        arena: Arena,
        num_states: int = 1,
    ) -> None:
        self.stored = stored
        self.num_groups = len(shape.groups)
        size = (num_blocks, shape.buffer_bytes)
        self._shape = shape
        self._buffers = [arena.allocate(size, torch.uint8) for _ in range(shape.num_buffers)]
        self.layers, self.entries = self._layers_of(model, 0), self._entries_of(model, 0)
        self.states: dict[int, Tensor] = {
            layer: arena.allocate((num_states, shape.state_bytes), torch.uint8)
            for layer in shape.state_layers
        }
        self.state_group, self.interval = shape.states or (0, 0)

    @property
    def block_size(self) -> int:
        """The number of tokens in a block of keys and values."""
        return self._shape.block_size

    @property
    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers of blocks of keys and values, and those of states, [num_blocks, part_bytes]
        each."""
        return self._buffers, [*self.states.values()]

    def of_draft(self, model: ModelConfig, first: int) -> CpuKVCache:
        """Return the cache as another model sees it, whose layers are those from index `first` on
        in the groups."""
        view = copy(self)
        view.layers = self._layers_of(model, first)
        view.entries = self._entries_of(model, first)
        return view

    def own_layers(self, model: ModelConfig) -> dict[int, Tensor]:
        """The blocks of the layers that have keys and values of their own."""
        return {
            layer: self.layers[layer].blocks
            for layer, heads in enumerate(model.layer_kv)
            if heads is not None and layer not in model.kv_sources
        }

    def _layers_of(self, model: ModelConfig, first: int) -> dict[int, LayerCache]:
        layers = self._parts(model.layer_kv, first)
        for layer, source in model.kv_sources.items():
            layers[layer] = layers[source]
        return layers

    def _entries_of(self, model: ModelConfig, first: int) -> dict[int, LayerCache]:
        return self._parts(layer_entries(model), first + len(model.layer_kv))

    def _parts(self, every: Sequence[KVHeads | None], first: int) -> dict[int, LayerCache]:
        """Return what is stored of some layers, which are those from index `first` on."""
        shape, layers, places = self._shape, {}, self._shape.places
        for layer, heads in enumerate(every):
            if heads is not None:
                group, buffer, part = places[first + layer]
                layout = layout_of(heads, shape.block_size, self.stored)
                begin = part * layout.block_bytes
                blocks = self._buffers[buffer][:, begin : begin + layout.block_bytes]
                layers[layer] = LayerCache(group, blocks, layout)
        return layers

    def copy_state(self, source: int, target: int) -> None:
        """Copy a block of states to another."""
        for states in self.states.values():
            states[target] = states[source]
