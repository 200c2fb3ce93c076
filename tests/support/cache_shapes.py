"""Shapes of KV caches for tests that need no engine."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.core.kv_groups import FullAttention, KVGroup, SlidingWindow, group_layers
from shmllm.worker.memory import CacheShape


def one_group(layer_bytes: int, block_size: int = 16, num_layers: int = 1) -> CacheShape:
    """The shape of a cache whose layers keep everything."""
    return CacheShape(
        (KVGroup(FullAttention(), tuple(range(num_layers))),), block_size, layer_bytes, 64
    )


def grouped(windows: Sequence[int | None], block_size: int, layer_bytes: int = 1) -> CacheShape:
    """The shape of the cache of layers with these windows."""
    rules = [FullAttention() if window is None else SlidingWindow(window) for window in windows]
    return CacheShape(group_layers(rules), block_size, layer_bytes, 64)
