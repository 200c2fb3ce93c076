"""A copy of a GPU's memory in pinned host memory, which exists while an engine sleeps.

The kernel zeroes each page before it hands it out, which takes longer than the copy: so several
threads get the pages, which are huge, part by part, while the parts before are registered and
copied. One step after the other, `sleep(1)` took 1.5 s for 16 GB on the host of an H200.

CUDA registers the memory, since torch's pinned allocator rounds sizes up to powers of two and keeps
freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmllm.shared_kv.memory_calls import POPULATE_WRITE, advise

MIB = 2**20
PART_BYTES = 256 * MIB
MOST_THREADS = 16


class HostCopy:
    """A copy of device memory.

    Args:
        call: calls a function of the CUDA driver and raises its errors.
        address: the address of the device memory.
        num_bytes: its size.

    Raises:
        MemoryError: there is not enough host memory.
    """

    def __init__(self, call: Callable[..., Any], address: int, num_bytes: int) -> None:
        self._call = call
        try:
            self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as problem:
            raise MemoryError(
                f"no {num_bytes / MIB:,.0f} MiB of host memory to keep the contents in"
            ) from problem
        with contextlib.suppress(OSError):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._anchor = (ctypes.c_char * num_bytes).from_buffer(self._pages)
        self._address = ctypes.addressof(self._anchor)
        self._parts = [
            (begin, min(PART_BYTES, num_bytes - begin)) for begin in range(0, num_bytes, PART_BYTES)
        ]
        self._registered: list[int] = []
        try:
            self._copy_from(address)
        except BaseException:
            self.close()
            raise

    def _copy_from(self, address: int) -> None:
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            # The results come in the order of the parts.
            for begin, size in pool.map(self._populate, self._parts):
                self._call("cuMemHostRegister", self._address + begin, size, 0)
                self._registered.append(begin)
                self._call("cuMemcpyDtoH", self._address + begin, address + begin, size)

    def _populate(self, part: tuple[int, int]) -> tuple[int, int]:
        """Get the pages of a part. Where the kernel cannot, the driver does. Threads that call this
        have no CUDA context."""
        begin, size = part
        advise(self._address + begin, size, POPULATE_WRITE)
        return part

    def copy_back(self, address: int) -> None:
        """Copy the contents to device memory of the same size."""
        for begin, size in self._parts:
            self._call("cuMemcpyHtoD", address + begin, self._address + begin, size)

    def close(self) -> None:
        """Give the host memory back."""
        for begin in self._registered:
            self._call("cuMemHostUnregister", self._address + begin)
        self._registered.clear()
        del self._anchor
        self._pages.close()
