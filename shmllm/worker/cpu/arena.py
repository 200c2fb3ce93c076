"""The arena of a CPU: host memory whose pages the kernel provides when they are first written.

A large arena therefore costs only the part of it that is used.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from shmllm.errors import EngineStartError
from shmllm.worker.arena import BumpAllocator, Contents, resident_bytes_of


class HostArena:
    """Host memory for tensors.

    `release(keep=True)` leaves the contents in place: there is no cheaper memory to move them to.

    Args:
        num_bytes: the size of all tensors that `allocate` can return, in total.
        purpose: what the memory is for, for the error message.
        huge_pages: ask for pages of 2 MiB where the system has them: with these, kernels read
            large matrices up to 1.5 times as fast.

    Raises:
        EngineStartError: the system refuses that much memory.
    """

    def __init__(self, num_bytes: int, purpose: str, *, huge_pages: bool = False) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.PRESENT
        try:
            # Private: MADV_DONTNEED frees no page of a shared mapping.
            self._pages = mmap.mmap(
                -1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as problem:
            raise EngineStartError(
                f"no memory for {purpose}: {num_bytes / 2**20:,.0f} MiB were asked for and "
                f"the system refused ({problem.strerror})"
            ) from problem
        if huge_pages:
            with contextlib.suppress(OSError):
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._allocator = BumpAllocator(num_bytes)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        begin, count = self._allocator.allocate(shape, dtype), math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        # A storage of its own: pickling a tensor pickles the whole storage.
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=begin).view(shape)

    def release(self, keep: bool = False) -> None:
        if self.contents is Contents.LOST:
            return
        self.contents = Contents.KEPT if keep else Contents.LOST
        if not keep:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        self.contents = Contents.PRESENT

    @property
    def resident_bytes(self) -> int:
        """The bytes of the pages that were touched."""
        return resident_bytes_of(self._pages)
