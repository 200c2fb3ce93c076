"""The host's memory: how much of it is free, and how much of it the KV cache gets."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from shmllm.config.engine import CacheConfig
from shmllm.config.host import available_memory_bytes
from shmllm.worker.arena import Arena
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.memory import MIB, CacheShape, CacheSize, fit_kv_cache

DEFAULT_KV_CACHE_BYTES = 2**31
DEFAULT_KV_CACHE_FRACTION = 4
LARGEST_KEPT_BYTES = 32 * MIB
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class HostMemory:
    """The host's memory. Its arenas have huge pages, since each step reads all weights.

    Args:
        num_ranks: the number of processes that divide the KV cache, those of all engines of a pool.
        num_needing: the number of processes that need as much memory as this one, and have not
            taken it yet. Rank 0 of a group checks so that the sum is free; each other rank checks
            its own part, when some have taken theirs.

    Attributes:
        counts_shared: whether memory that this process shares with others counts as used.
    """

    is_lazy = True

    def __init__(self, num_ranks: int = 1, num_needing: int = 1) -> None:
        self.counts_shared = True
        self._num_ranks = num_ranks
        self._num_needing = num_needing
        many = f" for each of {num_needing} processes"
        self.kind = f"memory{many if num_needing > 1 else ''}"

    def free_bytes(self) -> int:
        return available_memory_bytes() // self._num_needing

    def used_bytes(self) -> int:
        return resident_bytes() - (0 if self.counts_shared else resident_bytes("RssShmem"))

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        return HostArena(num_bytes, purpose, huge_pages=True)

    def trim(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def size_cache(self, config: CacheConfig, shape: CacheShape, max_model_len: int) -> CacheSize:
        """Compute the size of the KV cache: the rank's part of what the options say, or by default
        of the smaller of 2 GiB and a quarter of the free memory.

        Args:
            config: the configuration of the cache.
            shape: the division of the cache.
            max_model_len: the configured length, in tokens.

        Raises:
            EngineStartError: see `fit_kv_cache`.
        """
        num_bytes = config.given_bytes(shape.bytes_for, self._num_ranks)
        if num_bytes is None:
            share = self.free_bytes() // DEFAULT_KV_CACHE_FRACTION
            num_bytes = min(DEFAULT_KV_CACHE_BYTES // self._num_ranks, share)
        return fit_kv_cache(num_bytes, shape, max_model_len, num_ranks=self._num_ranks)


def keep_freed_memory() -> None:
    """Make the C library keep the memory that a step's tensors free, for the next step. By
    default it maps and page-faults every tensor above about 100 KiB again, which takes a tenth
    of the time of a prompt. Allocations above LARGEST_KEPT_BYTES, and `malloc_trim`, still give
    memory back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 8 * LARGEST_KEPT_BYTES)


def resident_bytes(kind: str = "VmRSS") -> int:
    """Return the memory of this process that is in RAM, in bytes. On older kernels this number
    is wrong by some pages per core; smaps_rollup is exact everywhere, and takes 10 ms per GiB.

    Args:
        kind: all of it, or the part that /proc/self/status calls so.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0
