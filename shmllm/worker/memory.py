"""How much memory there is, and what the KV cache may take of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from shmllm.config import CacheConfig
from shmllm.errors import EngineStartError

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


def check_weights_fit(weight_bytes: int, kind: str, available: int) -> None:
    """Raise EngineStartError, with both numbers, if the weights exceed the available memory.
    That is also what loading takes, but for one tensor at a time."""
    if weight_bytes > available:
        smaller = SMALLER.get(kind, "")
        raise EngineStartError(
            f"the weights need {weight_bytes / MIB:,.0f} MiB in {kind} and "
            f"{available / MIB:,.0f} MiB of memory are free{smaller}"
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
    """Fit blocks into the memory there is, and max_model_len to the blocks.

    Raises:
        EngineStartError: not even one block for one sequence fits.
    """
    num_bytes = config.memory_bytes
    if num_bytes is None:
        share = available_memory_bytes() // DEFAULT_KV_CACHE_FRACTION
        num_bytes = min(DEFAULT_KV_CACHE_BYTES, share)
    for_one = -(-max_model_len // config.block_size) + 1
    num_blocks = num_bytes // bytes_per_block
    capacity = (num_blocks - 1) * config.block_size
    if capacity < config.block_size:
        raise EngineStartError(
            f"not enough memory for one sequence: kv_cache_memory_bytes is {num_bytes:,} and "
            f"the smallest cache, two blocks of {config.block_size} tokens, needs "
            f"{2 * bytes_per_block:,}"
        )
    if capacity >= max_model_len:
        return CacheSize(num_blocks, max_model_len, None)
    warning = (
        f"max_model_len is {capacity:,} instead of {max_model_len:,}: the KV cache of "
        f"{num_bytes / MIB:,.0f} MiB holds no longer sequence; raise kv_cache_memory_bytes to "
        f"{for_one * bytes_per_block:,} for all of it"
    )
    return CacheSize(num_blocks, capacity, warning)
