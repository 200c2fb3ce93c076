"""Writes keys and values that an encoder computes of items to the KV cache of a GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.worker.arrays import LongArray
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.transfers import Transfers
from shmllm_kernels.gpu.rope_write import rope_and_write


class EncodedPrefixes:
    """
    Args:
        config: the model's configuration, which has such positions.
        cache: the KV cache.
        transfers: sends slots.
    """

    def __init__(self, config: ModelConfig, cache: GpuKVCache, transfers: Transfers) -> None:
        self._transfers = transfers
        self._layers = [cache.layers[layer] for layer in sorted(set(config.kv_sources.values()))]
        self._width = config.item_width

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel: requests should not wait for it. Nothing is written.

        Args:
            dtype: that of embeddings.
        """
        groups = 1 + max(group for group, *_ in self._layers)
        nowhere = np.full((groups, 1), -1)
        device = self._transfers.torch_device
        self.write(torch.zeros(1, self._width, dtype=dtype, device=device), nowhere)

    def write(self, embeds: Tensor, slots: LongArray) -> None:
        """Launch the writing of keys and values, behind the steps that were launched before.

        Args:
            embeds: [positions, width]: for each layer its keys, then its values.
            slots: (groups, positions) int64, the slots of the KV cache in each group of layers; -1:
                nothing is written.
        """
        sent = self._transfers.send_one(slots)
        widths = [2 * keys.shape[2] * keys.shape[3] for _, keys, _ in self._layers]
        parts = embeds.split_with_sizes(widths, 1)
        for (group, keys, values), part in zip(self._layers, parts, strict=True):
            heads = part.unflatten(1, (-1, keys.shape[3]))
            no_queries = heads[:, :0]
            rope_and_write(no_queries, keys, values, heads, None, None, sent[group])
