"""The host's memory: how much of it is free, and how much of it the KV cache gets."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from shmllm.config.engine import CacheConfig
from shmllm.worker.arena import Arena
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.memory import MIB, CacheSize, fit_kv_cache

DEFAULT_KV_CACHE_BYTES = 2**31
DEFAULT_KV_CACHE_FRACTION = 4
LARGEST_KEPT_BYTES = 32 * MIB
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class HostMemory:
    """The machine's own memory, in huge pages: weights are read whole, again and again."""

    kind = "memory"
    is_lazy = True

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def used_bytes(self) -> int:
        return resident_bytes()

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        return HostArena(num_bytes, purpose, huge_pages=True)

    def trim(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def size_cache(
        self, config: CacheConfig, bytes_per_block: int, max_model_len: int
    ) -> CacheSize:
        """Fit blocks into the machine's memory, and max_model_len to the blocks.

        Raises:
            EngineStartError: not even one block for one sequence fits.
        """
        num_bytes = config.memory_bytes
        if num_bytes is None:
            share = self.free_bytes() // DEFAULT_KV_CACHE_FRACTION
            num_bytes = min(DEFAULT_KV_CACHE_BYTES, share)
        return fit_kv_cache(num_bytes, config.block_size, bytes_per_block, max_model_len)


def keep_freed_memory() -> None:
    """Have the C library keep what a step's tensors free for the next step. Otherwise every
    tensor above some 100 KiB is mapped and faulted in anew: a tenth of a prompt's time.
    What is larger than the limit, and `malloc_trim`, still give memory back."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 8 * LARGEST_KEPT_BYTES)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int:
    """What the kernel says can be used without swapping, less where a cgroup allows less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read_int("/sys/fs/cgroup/memory.max")
    used = _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def resident_bytes() -> int:
    """Memory that this process has in RAM. Older kernels are off by some pages a core here;
    smaps_rollup is exact everywhere, and takes 10 ms per GiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
