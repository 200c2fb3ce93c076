"""The memory of this machine that processes may still take; front ends and engines ask for it."""

from __future__ import annotations

import os
from pathlib import Path


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int:
    """Return the memory that can be used without swapping, as /proc/meminfo estimates it, or the
    memory left below the cgroup's limit if that is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read_int("/sys/fs/cgroup/memory.max")
    used = _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available
