"""The memory that a runner allocates its arenas in, and the size of the KV cache.

This module owns the interface of a memory pool, and the arithmetic and the error messages of
fitting weights and KV blocks into it. `cpu.memory` and `gpu.memory` have the pools.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from shmllm.config.engine import EngineConfig
from shmllm.core.kv_groups import (
    ChunkedLocal,
    FullAttention,
    KVGroup,
    KVRule,
    RecurrentState,
    SlidingWindow,
    buffers_per_block,
    group_layers,
    most_blocks,
    most_states,
)
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.entries import layer_entries, stored_kv
from shmllm.models.kv_heads import KVHeads
from shmllm.models.mixer_specs import shares_choice
from shmllm.worker.arena import ALIGNMENT_BYTES, Arena
from shmllm_kernels.windows import Chunk, Window

MIB = 2**20
LONGEST_INTERVAL = 2**40
"""More tokens than any request has: it never needs a second block of states."""
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


class Place(NamedTuple):
    """Where a layer has its keys and values.

    group: the index of its group.
    buffer: the index of the buffer in the blocks of the group.
    part: its index among the layers that share the buffer.
    """

    group: int
    buffer: int
    part: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The division of a model's KV cache, before its size is known.

    A number of blocks is that of blocks of keys and values, or, if no layer has these, of states.

    Attributes:
        groups: the groups of layers.
        block_size: tokens in a block.
        buffer_bytes: the size of a block in one buffer: the keys and values of the layer that has
            most, or of several others.
        max_step_tokens: the most tokens of one request that a step computes.
        max_states: the most blocks of states that running requests have use for at a time, if
            each one's tokens fit into one.
        state_bytes: the state of a request in one layer that has one.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    buffer_bytes: int
    max_step_tokens: int
    max_states: int = 2
    state_bytes: int = 0

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        bytes_of: Callable[[KVHeads], int],
        draft: ModelConfig | None = None,
    ) -> Self:
        """
        Args:
            config: the engine's configuration.
            model: the model's.
            bytes_of: returns the size of a block's keys and values in a layer.
            draft: that of a model that drafts, whose layers lie behind the model's, and keep all.
        """
        cache, scheduler = config.cache, config.scheduler
        interval = cache.mamba_block_size if cache.enable_prefix_caching else LONGEST_INTERVAL
        rules = layer_rules(
            model, cache.disable_hybrid_kv_cache_manager, interval, cache.block_size
        )
        stored = [*stored_kv(model)]
        if draft is not None:
            rules += layer_rules(draft, True, interval, cache.block_size)
            stored += stored_kv(draft)
        layer_bytes = [0 if heads is None else bytes_of(heads) for heads in stored]
        return cls(
            group_layers(rules, layer_bytes, _layers_that_share_choices(model)),
            cache.block_size,
            max(layer_bytes),
            scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens,
            2 * config.num_rows + config.max_drafting,
            -(-max(model.layer_state_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
        )

    @property
    def num_buffers(self) -> int:
        """The number of buffers of a block of keys and values."""
        return buffers_per_block(self.groups)

    @property
    def bytes_per_block(self) -> int:
        """The keys and values of a block, in all layers."""
        return self.num_buffers * self.buffer_bytes

    @property
    def states(self) -> tuple[int, int] | None:
        """The index of the group of states, and the number of tokens of its blocks; None: no layer
        has a state."""
        for index, group in enumerate(self.groups):
            if group.rule.interval is not None:
                return index, group.rule.interval
        return None

    @property
    def bytes_per_state(self) -> int:
        """A block of states, in all layers."""
        return len(self.state_layers) * self.state_bytes

    @property
    def content(self) -> str:
        """What a block has, in words."""
        return f"{self.block_size} tokens" if self.num_buffers else "states"

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that have a state."""
        return () if self.states is None else self.groups[self.states[0]].layers

    @property
    def places(self) -> dict[int, Place]:
        """Where each layer that stores keys and values has them."""
        return {
            layer: Place(number, *divmod(index, group.per_buffer))
            for number, group in enumerate(self.groups)
            if group.rule.interval is None
            for index, layer in enumerate(group.layers)
        }

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at any time."""
        if not self.num_buffers:
            return self.states_held(num_tokens)
        return most_blocks(self.groups, num_tokens, self.max_step_tokens, self.block_size)

    def states_held(self, num_tokens: int) -> int:
        """Return the most blocks of states that a request of `num_tokens` tokens holds."""
        return most_states(self.groups, num_tokens, self.max_step_tokens)

    def states_for(self, num_blocks: int) -> int:
        """Return the number of blocks of states, with the padding block, in a cache of `num_blocks`
        blocks.

        Beside keys and values there are two for each request that may run, one for each for which
        tokens may be drafted, and one for each interval of the tokens that fit, but no more than
        the memory of the keys and values holds; and always as many as the longest request needs.
        """
        if self.states is None:
            return 1
        if not self.num_buffers:
            return num_blocks
        num_tokens = num_blocks * self.block_size
        wanted = self.max_states + num_tokens // self.states[1]
        most = num_blocks * self.bytes_per_block // self.bytes_per_state
        return 1 + max(min(wanted, most), self.states_held(num_tokens))

    def bytes_for(self, num_blocks: int) -> int:
        """Return the size of a cache with `num_blocks` blocks."""
        states = self.states_for(num_blocks) * self.bytes_per_state
        return num_blocks * self.bytes_per_block + states

    def num_blocks(self, num_bytes: int) -> int:
        """Return the number of blocks in a cache of `num_bytes`."""
        most = max(num_bytes, 0) // (self.bytes_per_block or self.bytes_per_state)
        return bisect_right(range(1, most + 1), num_bytes, key=self.bytes_for)

    def longest_request(self, num_blocks: int, most: int) -> int:
        """Return the length of the longest request, at most `most` tokens, that never holds more
        than `num_blocks` blocks."""
        return bisect_right(range(1, most + 1), num_blocks, key=self.blocks_for)


def _layers_that_share_choices(model: ModelConfig) -> set[int]:
    """Return the layers that attend to the slots which an indexer of a layer before has chosen."""
    return {i for i, layer in enumerate(model.layers) if any(map(shares_choice, layer.mixers))}


def layer_rules(
    model: ModelConfig, keeps_all: bool, interval: int, block_size: int
) -> list[tuple[KVRule, ...]]:
    """Return what each layer keeps, of keys and values and of its state; empty: it stores nothing.
    Behind the layers are entries, as in `stored_kv`.

    Args:
        model: the model.
        keeps_all: whether layers keep what is behind their windows, too.
        interval: the number of tokens between two states, rounded up to a multiple of `block_size`.
        block_size: tokens in a block.
    """
    state = RecurrentState(-(-interval // block_size) * block_size)

    def rules(heads: KVHeads | None, window: Window | None, num_bytes: int) -> tuple[KVRule, ...]:
        kept: tuple[KVRule, ...] = () if num_bytes == 0 else (state,)
        return kept if heads is None else (rule(window), *kept)

    def rule(window: Window | None) -> KVRule:
        if window is None or keeps_all:
            return FullAttention()
        if isinstance(window, Chunk):
            return ChunkedLocal(window.size)
        return SlidingWindow(window)

    windows = list(model.layer_windows)
    for layer, source in model.kv_sources.items():
        if windows[layer] is None:
            windows[source] = None  # it keeps what the layer that reads it reads
    every = zip(model.layer_kv, windows, model.layer_state_bytes, strict=True)
    of_entries = [rules(heads, None, 0) for heads in layer_entries(model)]
    return [*(rules(*layer) for layer in every), *of_entries]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """
    Attributes:
        num_blocks: the number of blocks of keys and values to allocate, with the padding block,
            which is the only one if no layer has any.
        num_states: the number of blocks of states, likewise.
        num_bytes: the memory of all of them.
        max_model_len: the largest number of tokens of a request, so that one always fits.
        warning: a sentence if max_model_len is smaller than configured, else None.
    """

    num_blocks: int
    num_states: int
    num_bytes: int
    max_model_len: int
    warning: str | None

    @classmethod
    def of(
        cls, shape: CacheShape, num_blocks: int, max_model_len: int, warning: str | None = None
    ) -> Self:
        """
        Args:
            shape: the division of the cache.
            num_blocks: the number of its blocks.
            max_model_len: see the attribute.
            warning: see the attribute.
        """
        sizes = shape.states_for(num_blocks), shape.bytes_for(num_blocks)
        return cls(num_blocks if shape.num_buffers else 1, *sizes, max_model_len, warning)


def smallest(sizes: Iterable[CacheSize]) -> CacheSize:
    """Return the size that fits on all ranks of a group, of those that fit on each. Where layers
    have only states, num_blocks is 1."""
    return min(sizes, key=lambda each: (each.num_blocks, each.num_states))


def fit_kv_cache(
    num_bytes: int, shape: CacheShape, max_model_len: int, origin: str = "", num_ranks: int = 1
) -> CacheSize:
    """Compute how many blocks fit into `num_bytes`, and reduce max_model_len if it must be.

    Args:
        num_bytes: the memory for the cache in one process.
        shape: the division of the cache.
        max_model_len: the configured length, in tokens.
        origin: where `num_bytes` comes from and which options change it, for messages; empty if
            kv_cache_memory_bytes sets it.
        num_ranks: the number of processes that have such a cache; messages have the sum of all.

    Raises:
        EngineStartError: the smallest cache, one block of tokens beside the padding block, does
            not fit.
    """
    block_size = shape.block_size
    needed_bytes = shape.bytes_for(shape.blocks_for(max_model_len) + 1)
    fewest = shape.blocks_for(block_size) + 1
    num_blocks = shape.num_blocks(num_bytes)
    if num_blocks < fewest:
        limit = "what is left for the KV cache" if origin else "kv_cache_memory_bytes"
        raise EngineStartError(
            "not enough memory for one sequence: "
            f"{limit} is {max(num_bytes, 0) * num_ranks:,} and the "
            f"smallest cache, {fewest} blocks of {shape.content}, needs "
            f"{shape.bytes_for(fewest) * num_ranks:,}{origin}"
        )
    capacity = shape.longest_request(num_blocks - 1, max_model_len)
    if capacity == max_model_len:
        return CacheSize.of(shape, num_blocks, max_model_len)
    needed_bytes *= num_ranks
    advice = origin or f"; raise kv_cache_memory_bytes to {needed_bytes:,} for all of it"
    warning = (
        f"max_model_len is {capacity:,} instead of {max_model_len:,}: the KV cache of "
        f"{num_bytes * num_ranks / MIB:,.0f} MiB holds no longer sequence{advice}"
    )
    return CacheSize.of(shape, num_blocks, capacity, warning)
