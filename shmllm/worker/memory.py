"""How much memory there is, and what the KV cache may take of it.

Owns the interface of a place that has memory, and the machine's own; `gpu.memory` has a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shmllm.errors import EngineStartError
from shmllm.worker.arena import Arena

MIB = 2**20
SMALLER = {
    "float32": "; dtype='bfloat16' needs half, quantization='int8' less",
    "bfloat16": "; quantization='int8' needs less",
    "float16": "; quantization='int8' needs less",
}


class MemoryPool(Protocol):
    """Where a runner has its arenas.

    Attributes:
        kind: of memory, for messages.
        is_lazy: memory is taken when it is first written, not when an arena is made or restored.
    """

    kind: str
    is_lazy: bool

    def free_bytes(self) -> int:
        """What can be used."""

    def used_bytes(self) -> int:
        """What this process has."""

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        """A piece of it; EngineStartError if it does not give that much."""

    def trim(self) -> None:
        """Give back what was freed and kept for the next who asks."""


def check_weights_fit(weight_bytes: int, dtype: str, pool: MemoryPool) -> None:
    """Raise EngineStartError, with both numbers, if the weights exceed what is free. That is
    also what loading takes, but for one tensor at a time."""
    available = pool.free_bytes()
    if weight_bytes > available:
        smaller = SMALLER.get(dtype, "")
        raise EngineStartError(
            f"the weights need {weight_bytes / MIB:,.0f} MiB in {dtype} and "
            f"{available / MIB:,.0f} MiB of {pool.kind} are free{smaller}"
        )


@dataclass(frozen=True, slots=True)
class CacheSize:
    """
    Attributes:
        num_blocks: blocks to allocate, the padding block included.
        max_model_len: what a request may be long, so that one always fits.
        warning: set if that is less than was wanted.
    """

    num_blocks: int
    max_model_len: int
    warning: str | None


def fit_kv_cache(
    num_bytes: int, block_size: int, bytes_per_block: int, max_model_len: int, origin: str = ""
) -> CacheSize:
    """As many blocks as that many bytes hold, and max_model_len as they allow.

    Args:
        origin: where the number of bytes comes from and what changes it, for messages.

    Raises:
        EngineStartError: not even one block for one sequence fits.
    """
    for_one = (-(-max_model_len // block_size) + 1) * bytes_per_block
    num_blocks = num_bytes // bytes_per_block
    capacity = (num_blocks - 1) * block_size
    if capacity < block_size:
        given = "what is left for the KV cache" if origin else "kv_cache_memory_bytes"
        raise EngineStartError(
            f"not enough memory for one sequence: {given} is {max(num_bytes, 0):,} and the "
            f"smallest cache, two blocks of {block_size} tokens, needs {2 * bytes_per_block:,}"
            f"{origin}"
        )
    if capacity >= max_model_len:
        return CacheSize(num_blocks, max_model_len, None)
    cure = origin or f"; raise kv_cache_memory_bytes to {for_one:,} for all of it"
    warning = (
        f"max_model_len is {capacity:,} instead of {max_model_len:,}: the KV cache of "
        f"{num_bytes / MIB:,.0f} MiB holds no longer sequence{cure}"
    )
    return CacheSize(num_blocks, capacity, warning)
