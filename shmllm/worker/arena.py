"""One flat piece of memory at a fixed address, from which tensors are cut.

Weights live in one arena and keys and values in another. An arena can give its memory back
and have it again at the same addresses, so that whatever points into it stays valid. New
memory is zeroed, so that slots of the cache that nobody wrote yet are finite.

Owns the interface, and the arena of a CPU, whose pages come from the kernel when they are
first touched: a large one costs what is used of it. `cuda_arena` has a GPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from enum import Enum, auto
from typing import Protocol

import torch

from shmllm.errors import EngineStartError

ALIGNMENT_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


class Contents(Enum):
    """
    HERE   -> KEPT   release(keep=True): the memory is given back, but for what a CPU keeps
    HERE   -> LOST   release(keep=False)
    KEPT   -> LOST   release(keep=False)
    KEPT   -> HERE   restore: as they were
    LOST   -> HERE   restore: zeros

    Every other call changes nothing.
    """

    HERE = auto()
    KEPT = auto()
    LOST = auto()


class Arena(Protocol):
    """Memory for tensors.

    Attributes:
        num_bytes: the most that `allocate` can give out.
        contents: what has become of them.
    """

    num_bytes: int
    contents: Contents

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor of `shape` at the next free address."""

    def release(self, keep: bool = False) -> None:
        """Give the memory back. Nobody may use the tensors until `restore`."""

    def restore(self) -> None:
        """Have memory at the same addresses again.

        Raises:
            MemoryError: there is not enough; nothing changed.
        """

    @property
    def resident_bytes(self) -> int:
        """Memory that is there now."""


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `Arena.allocate(shape, dtype)` uses up."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class CountingAllocator:
    """Stands in for an arena to learn how large it must be: gives out meta tensors."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_bytes += padded_bytes(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


class BumpAllocator:
    """Finds places for tensors, one behind the other."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._used_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Where the next one begins. Raises AssertionError where the memory ends."""
        begin = self._used_bytes
        self._used_bytes += padded_bytes(shape, dtype)
        assert self._used_bytes <= self._num_bytes, "the arena was counted too small"
        return begin


class HostArena:
    """Host memory for tensors.

    What is kept stays where it is: there is no cheaper place for it.

    Args:
        num_bytes: the most that `allocate` can give out.
        purpose: what it holds, for the error message.
        huge_pages: ask for pages of 2 MiB, where the system has them: what streams through the
            cores is read up to half as fast again.

    Raises:
        EngineStartError: the machine does not give that much memory.
    """

    def __init__(self, num_bytes: int, purpose: str, *, huge_pages: bool = False) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.HERE
        try:
            # Private: the kernel takes back no page of a shared mapping.
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
        self._address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()
        self._allocator = BumpAllocator(num_bytes)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        begin, count = self._allocator.allocate(shape, dtype), math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        # A storage of its own: a tensor that is pickled takes all of its storage along.
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=begin).view(shape)

    def release(self, keep: bool = False) -> None:
        if self.contents is Contents.LOST:
            return
        self.contents = Contents.KEPT if keep else Contents.LOST
        if not keep:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        self.contents = Contents.HERE

    @property
    def resident_bytes(self) -> int:
        """Pages that were touched."""
        num_pages = -(-len(self._pages) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * num_pages)()
        address, size = ctypes.c_void_p(self._address), ctypes.c_size_t(len(self._pages))
        if _libc.mincore(address, size, found):
            raise OSError(ctypes.get_errno(), "mincore")
        return bytes(found).count(1) * mmap.PAGESIZE


def make_arena(num_bytes: int, purpose: str, device: torch.device) -> Arena:
    """Memory of that device.

    Raises:
        EngineStartError: it does not give that much.
    """
    if device.type == "cuda":
        from shmllm.worker.gpu.arena import CudaArena
        from shmllm.worker.gpu.plain_arena import PlainArena

        try:
            return CudaArena(num_bytes, purpose, device)
        except (ImportError, RuntimeError) as problem:  # no cuda-bindings, or a driver without it
            return PlainArena(num_bytes, purpose, device, reason=str(problem))
    return HostArena(num_bytes, purpose)
