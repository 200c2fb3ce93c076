"""The memory that a runner allocates its arenas in, and the size of the KV cache.

This module owns the interface of a memory pool, and the arithmetic and the error messages of
fitting weights and KV blocks into it. `cpu.memory` and `gpu.memory` have the pools.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from shmllm.config.engine import EngineConfig
from shmllm.core.kv_groups import (
    FullAttention,
    KVGroup,
    KVRule,
    SlidingWindow,
    buffers_per_block,
    group_layers,
    most_blocks,
)
from shmllm.errors import EngineStartError
from shmllm.worker.arena import Arena

MIB = 2**20
SMALLER_DTYPES = {
    "float32": "; dtype='bfloat16' needs half, quantization='int8' or 'int4' less",
    "bfloat16": "; quantization='int8' or 'int4' needs less",
    "float16": "; quantization='int8' or 'int4' needs less",
    "int8": "; quantization='int4' needs less",
}


class MemoryPool(Protocol):
    """The memory of a device.

    Attributes:
        kind: the name of the memory in error messages.
        is_lazy: whether an arena takes memory when it is first written, and not when it is made
            or restored.
    """

    kind: str
    is_lazy: bool

    def free_bytes(self) -> int:
        """Return the memory that can still be allocated, in bytes."""

    def used_bytes(self) -> int:
        """Return the memory that this process uses, in bytes."""

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        """Allocate an arena.

        Args:
            num_bytes: the size of the arena.
            purpose: what the memory is for, for the error message.

        Raises:
            EngineStartError: there is not that much memory.
        """

    def trim(self) -> None:
        """Give the memory back to the system that an allocator keeps after it was freed."""


def check_weights_fit(weight_bytes: int, dtype: str, pool: MemoryPool) -> None:
    """Check that the weights fit into the free memory. Loading needs no more than the weights
    and one tensor.

    Args:
        weight_bytes: the size of all weights.
        dtype: the dtype or the quantization of the weights, for the error message.
        pool: the memory that the weights go into.

    Raises:
        EngineStartError: the weights do not fit; the message has both numbers.
    """
    available = pool.free_bytes()
    if weight_bytes > available:
        advice = SMALLER_DTYPES.get(dtype, "")
        raise EngineStartError(
            f"the weights need {weight_bytes / MIB:,.0f} MiB in {dtype} and "
            f"{available / MIB:,.0f} MiB of {pool.kind} are free{advice}"
        )


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The division of a model's KV cache, before its size is known.

    Attributes:
        groups: the groups of layers.
        block_size: tokens in a block.
        layer_bytes: the keys and values of a block in one layer.
        max_step_tokens: the most tokens of one request that a step computes.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    layer_bytes: int
    max_step_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, windows: Sequence[int | None], layer_bytes: int) -> Self:
        """
        Args:
            config: the engine's configuration.
            windows: for each layer its sliding window in tokens, or None.
            layer_bytes: the keys and values of a block in one layer.
        """
        keeps_all = config.cache.disable_hybrid_kv_cache_manager
        rules: list[KVRule] = [
            FullAttention() if window is None or keeps_all else SlidingWindow(window)
            for window in windows
        ]
        scheduler = config.scheduler
        longest = scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
        return cls(group_layers(rules), config.cache.block_size, layer_bytes, longest)

    @property
    def num_buffers(self) -> int:
        """The number of layers that a block has room for."""
        return buffers_per_block(self.groups)

    @property
    def bytes_per_block(self) -> int:
        return self.num_buffers * self.layer_bytes

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each layer the index of its group, and of its buffer in the blocks of the group."""
        places = {
            layer: (index, buffer)
            for index, group in enumerate(self.groups)
            for buffer, layer in enumerate(group.layers)
        }
        return [places[layer] for layer in range(len(places))]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at any time."""
        return most_blocks(self.groups, num_tokens, self.max_step_tokens, self.block_size)

    def longest_request(self, num_blocks: int, most: int) -> int:
        """Return the length of the longest request, at most `most` tokens, that never holds more
        than `num_blocks` blocks."""
        return bisect_right(range(1, most + 1), num_blocks, key=self.blocks_for)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """
    Attributes:
        num_blocks: the number of blocks to allocate, with the padding block.
        max_model_len: the largest number of tokens of a request, so that one always fits.
        warning: a sentence if max_model_len is smaller than configured, else None.
    """

    num_blocks: int
    max_model_len: int
    warning: str | None


def fit_kv_cache(
    num_bytes: int, shape: CacheShape, max_model_len: int, origin: str = ""
) -> CacheSize:
    """Compute how many blocks fit into `num_bytes`, and reduce max_model_len if it must be.

    Args:
        num_bytes: the memory for the cache.
        shape: the division of the cache.
        max_model_len: the configured length, in tokens.
        origin: where `num_bytes` comes from and which options change it, for messages; empty if
            kv_cache_memory_bytes sets it.

    Raises:
        EngineStartError: the smallest cache, one block of tokens beside the padding block, does
            not fit.
    """
    block_size, bytes_per_block = shape.block_size, shape.bytes_per_block
    needed_bytes = (shape.blocks_for(max_model_len) + 1) * bytes_per_block
    fewest = shape.blocks_for(block_size) + 1
    num_blocks = num_bytes // bytes_per_block
    if num_blocks < fewest:
        limit = "what is left for the KV cache" if origin else "kv_cache_memory_bytes"
        raise EngineStartError(
            f"not enough memory for one sequence: {limit} is {max(num_bytes, 0):,} and the "
            f"smallest cache, {fewest} blocks of {block_size} tokens, needs "
            f"{fewest * bytes_per_block:,}{origin}"
        )
    capacity = shape.longest_request(num_blocks - 1, max_model_len)
    if capacity == max_model_len:
        return CacheSize(num_blocks, max_model_len, None)
    advice = origin or f"; raise kv_cache_memory_bytes to {needed_bytes:,} for all of it"
    warning = (
        f"max_model_len is {capacity:,} instead of {max_model_len:,}: the KV cache of "
        f"{num_bytes / MIB:,.0f} MiB holds no longer sequence{advice}"
    )
    return CacheSize(num_blocks, capacity, warning)
