"""Writes keys and values that an encoder computes of items to the KV cache on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.cache import CpuKVCache, head_layout
from shmllm.worker.cpu.products import dtype_name
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.cache_layout import head_words
from shmllm_kernels.cpu.heads import STORE_HEADS


class EncodedPrefixes:
    """
    Args:
        config: the model's configuration, which has such positions.
        dtype: the dtype of the weights.
        cache: the KV cache.
        num_threads: the number of threads that write.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, cache: CpuKVCache, num_threads: int
    ) -> None:
        self._program = KernelProgram(num_threads)
        self._count = np.zeros(1, np.int64)
        self._slots: LongArray = np.zeros((cache.num_groups, config.num_encoded), np.int64)
        sources = sorted(set(config.kv_sources.values()))
        layouts = [head_layout(cache.layers[layer]) for layer in sources]
        self._widths = [
            layout.num_kv_heads * (layout.head_dim + layout.value_dim) for layout in layouts
        ]
        self._rows = torch.empty(config.num_encoded, max(self._widths), dtype=torch.float32)
        for layer in sources:
            self._record(cache, layer, dtype_name(dtype))

    def _record(self, cache: CpuKVCache, layer: int, kind: str) -> None:
        """Record how the rows become keys and values of a layer, whose part of the cache another
        one reads."""
        blocks, layout = cache.layers[layer].blocks, head_layout(cache.layers[layer])
        heads = head_words(layout, num_heads=0, block_stride=blocks.stride(0))
        rows = [self._rows.data_ptr(), 4 * self._rows.shape[1]]
        without_angles, without_norms = [0, 0], [0] * 10
        operands = [
            self._count.ctypes.data, heads.ctypes.data, *rows, *without_angles,
            self._slots[cache.layers[layer].group].ctypes.data, blocks.data_ptr(), *without_norms,
        ]  # fmt: skip
        kernel = STORE_HEADS[layout.stored, kind]
        self._program.record(kernel, operands, keep=[heads], label="store_encoded")

    def write(self, embeds: Tensor, slots: LongArray) -> None:
        """Write keys and values.

        Args:
            embeds: [positions, width]: for each layer its keys, then its values.
            slots: (groups, positions) int64, the slots of the KV cache in each group of layers.
        """
        count = self._count[0] = slots.shape[1]
        self._slots[:, :count] = slots
        for index, part in enumerate(embeds.split_with_sizes(self._widths, 1)):
            self._rows[:count, : part.shape[1]] = part
            self._program.replay(range(index, index + 1))
