"""How much memory there is, and what the KV cache may take of it.

Owns the interface of a place that has memory, and the machine's own; `gpu.memory` has a GPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shmllm.config.engine import CacheConfig
from shmllm.errors import EngineStartError
from shmllm.worker.arena import Arena, HostArena

DEFAULT_KV_CACHE_BYTES = 2**31
DEFAULT_KV_CACHE_FRACTION = 4
MIB = 2**20
LARGEST_KEPT_BYTES = 32 * MIB
SMALLER = {
    "float32": "; dtype='bfloat16' needs half, quantization='int8' less",
    "bfloat16": "; quantization='int8' needs less",
    "float16": "; quantization='int8' needs less",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


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


class Place(Protocol):
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

    def tidy(self) -> None:
        """Give back what was freed and kept for the next who asks."""


class Host:
    """The machine's own memory, in huge pages: weights are read whole, again and again."""

    kind = "memory"
    is_lazy = True

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def used_bytes(self) -> int:
        return resident_bytes()

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        return HostArena(num_bytes, purpose, huge_pages=True)

    def tidy(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int:
    """Memory that this process has in RAM. Older kernels are off by some pages a core here;
    smaps_rollup is exact everywhere, and takes 10 ms per GiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def check_weights_fit(weight_bytes: int, dtype: str, place: Place) -> None:
    """Raise EngineStartError, with both numbers, if the weights exceed what is free. That is
    also what loading takes, but for one tensor at a time."""
    available = place.free_bytes()
    if weight_bytes > available:
        smaller = SMALLER.get(dtype, "")
        raise EngineStartError(
            f"the weights need {weight_bytes / MIB:,.0f} MiB in {dtype} and "
            f"{available / MIB:,.0f} MiB of {place.kind} are free{smaller}"
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


def size_kv_cache(config: CacheConfig, bytes_per_block: int, max_model_len: int) -> CacheSize:
    """Fit blocks into the machine's memory, and max_model_len to the blocks.

    Raises:
        EngineStartError: not even one block for one sequence fits.
    """
    num_bytes = config.memory_bytes
    if num_bytes is None:
        share = available_memory_bytes() // DEFAULT_KV_CACHE_FRACTION
        num_bytes = min(DEFAULT_KV_CACHE_BYTES, share)
    return fit_kv_cache(num_bytes, config.block_size, bytes_per_block, max_model_len)


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
