"""Arenas: contiguous blocks of memory at fixed addresses, in which tensors are allocated.

The weights are in one arena and the KV cache in another. An arena can give its memory back and
take memory at the same addresses again, so that every pointer into it stays valid. New memory is
zeroed, so that the slots of the KV cache that no token has been written to hold finite numbers.

This module owns the interface and what all arenas share. `cpu.arena`, `gpu.arena` and
`gpu.plain_arena` implement it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from enum import Enum, auto
from typing import Protocol

import torch

ALIGNMENT_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


class Contents(Enum):
    """The state of what an arena holds, and the calls that change it:

    PRESENT -> KEPT      release(keep=True): the contents are saved (a CPU leaves them in place)
    PRESENT -> LOST      release(keep=False)
    KEPT    -> LOST      release(keep=False)
    KEPT    -> PRESENT   restore: the saved contents
    LOST    -> PRESENT   restore: zeros

    Every other call changes nothing.
    """

    PRESENT = auto()
    KEPT = auto()
    LOST = auto()


class Releasable(Protocol):
    """Memory for tensors that can be given back for a while."""

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in it."""

    @property
    def contents(self) -> Contents:
        """The state of what it holds."""

    def release(self, keep: bool = False) -> None:
        """Give the memory back. The tensors may not be used until `restore`."""

    def restore(self) -> None:
        """Take memory at the same addresses again.

        Raises:
            MemoryError: there is not enough memory; nothing changed.
        """

    @property
    def resident_bytes(self) -> int:
        """The memory that it takes now, in bytes."""


class Arena(Releasable, Protocol):
    """Memory for tensors, which are allocated one after the other."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor of `shape` at the next free address."""


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that `Arena.allocate(shape, dtype)` takes, with the padding."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def resident_bytes_of(pages: mmap.mmap) -> int:
    """Return the bytes of the pages of a mapping that are in memory."""
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    return resident_bytes_at(address, len(pages))


def resident_bytes_at(address: int, size: int) -> int:
    """Return the bytes of the pages from an address on, the begin of a page, that are in memory."""
    is_resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), is_resident):
        raise OSError(ctypes.get_errno(), "mincore")
    return bytes(is_resident).count(1) * mmap.PAGESIZE


class CountingAllocator:
    """Counts the bytes that an arena needs for a series of tensors, and returns meta tensors."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_bytes += padded_bytes(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


class BumpAllocator:
    """Assigns consecutive offsets in an arena of `num_bytes` bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._used_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the offset of the next tensor, in bytes. Raises AssertionError if the arena is
        full: whoever made it counted too few bytes."""
        begin = self._used_bytes
        self._used_bytes += padded_bytes(shape, dtype)
        assert self._used_bytes <= self._num_bytes, "the arena was counted too small"
        return begin
