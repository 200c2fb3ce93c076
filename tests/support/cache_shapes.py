"""Shapes of KV caches for tests that need no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shmllm.core.kv_groups import FullAttention, KVGroup, KVRule, SlidingWindow, group_layers
from shmllm.models.config import ModelConfig
from shmllm.models.entries import stored_kv
from shmllm.models.kv_heads import KVHeads
from shmllm.worker.memory import CacheShape, layer_rules


def one_group(layer_bytes: int, block_size: int = 16, num_layers: int = 1) -> CacheShape:
    """The shape of a cache whose layers keep everything."""
    return CacheShape(
        (KVGroup(FullAttention(), tuple(range(num_layers))),), block_size, layer_bytes, 64
    )


def grouped(windows: Sequence[int | None], block_size: int, layer_bytes: int = 1) -> CacheShape:
    """The shape of the cache of layers with these windows."""
    rules: list[tuple[KVRule]] = [
        (FullAttention() if window is None else SlidingWindow(window),) for window in windows
    ]
    return CacheShape(group_layers(rules), block_size, layer_bytes, 64)


def cache_shape(
    config: ModelConfig, block_size: int, bytes_of: Callable[[KVHeads], int]
) -> CacheShape:
    """The shape of a model's cache, with a state in each block.

    Args:
        config: the model's configuration.
        block_size: tokens in a block, and from one state to the next.
        bytes_of: returns the size of a block's keys and values in a layer.
    """
    sizes = [0 if heads is None else bytes_of(heads) for heads in stored_kv(config)]
    groups = group_layers(layer_rules(config, False, block_size, block_size), sizes)
    return CacheShape(groups, block_size, max(sizes), 64, state_bytes=max(config.layer_state_bytes))
