"""An arena whose tensors of blocks have room behind them: addresses at which blocks of other
engines are mapped, so that kernels find these by ids like the engine's own."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from shmllm.worker.arena import Contents

ROOM_BYTES = 2**40
"""The addresses that all tensors of an arena reserve. They take no memory."""
MOST_IDS = 2**24
_NO_ACCESS = 0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MAP_FIXED = 0x10
MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = _libc.munmap.argtypes[:2]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@dataclass(frozen=True, slots=True)
class RoomyTensor:
    """A tensor of blocks, and the addresses behind it.

    Attributes:
        address: the address of the first block; the begin of a page.
        count: the number of blocks.
        part_bytes: the size of a block.
        first: the first id behind the tensor's own whose address begins a page.
        room: the number of ids from there on.
    """

    address: int
    count: int
    part_bytes: int
    first: int
    room: int

    def map(self, fd: int, offset: int, first: int, count: int) -> None:
        """Let ids have the contents of a file, read-only.

        Args:
            fd: the file.
            offset: the byte offset in it, the begin of a page.
            first: the first id; with `count`, whole pages.
            count: the number of ids.

        Raises:
            OSError: the system refuses.
        """
        address, size = self.address + first * self.part_bytes, count * self.part_bytes
        _map(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        _libc.madvise(address, size, mmap.MADV_DONTDUMP)
        # Page faults of the first step that reads the blocks would take longer. An older system
        # refuses, which changes nothing else.
        _libc.madvise(address, size, MADV_POPULATE_READ)

    def unmap(self, first: int, count: int) -> None:
        """End that."""
        address, size = self.address + first * self.part_bytes, count * self.part_bytes
        _map(address, size, _NO_ACCESS, _RESERVED | _MAP_FIXED)


class RoomyArena:
    """Host memory for tensors of blocks, [count, part_bytes] uint8, whose pages the kernel provides
    when they are first written.

    `release(keep=True)` leaves the contents in place, as `HostArena` does.

    Args:
        num_bytes: the size of all tensors.
        bytes_per_id: the size of a block in all tensors; it decides how many ids there is room for.

    Attributes:
        tensors: the tensors, in the order in which they were allocated.

    Raises:
        OSError: the system refuses so many addresses (when a tensor is allocated).
    """

    def __init__(self, num_bytes: int, bytes_per_id: int) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.PRESENT
        self.tensors: list[RoomyTensor] = []
        self._room = min(ROOM_BYTES // max(bytes_per_id, 1), MOST_IDS)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor, [count, part_bytes] uint8, with room behind it.

        Raises:
            OSError: the system refuses the addresses.
        """
        assert dtype is torch.uint8
        count, part_bytes = shape
        quantum = mmap.PAGESIZE // gcd(mmap.PAGESIZE, part_bytes)
        first = -(-count // quantum) * quantum
        room = self._room // quantum * quantum
        size, own = (first + room) * part_bytes, first * part_bytes
        address = _map(None, size, _NO_ACCESS, _RESERVED)
        self.tensors.append(RoomyTensor(address, count, part_bytes, first, room))
        if _libc.mprotect(address, own, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _problem("mprotect")
        memory: Any = (ctypes.c_ubyte * (count * part_bytes)).from_address(address)
        memory.arena = self  # the tensor keeps the addresses
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def release(self, keep: bool = False) -> None:
        if self.contents is Contents.LOST:
            return
        self.contents = Contents.KEPT if keep else Contents.LOST
        if not keep:
            for each in self.tensors:
                _libc.madvise(each.address, each.first * each.part_bytes, mmap.MADV_DONTNEED)

    def restore(self) -> None:
        self.contents = Contents.PRESENT

    @property
    def resident_bytes(self) -> int:
        """The bytes of the own pages that were touched."""
        return sum(map(_resident_bytes, self.tensors))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for each in self.tensors:
                _libc.munmap(each.address, (each.first + each.room) * each.part_bytes)


def _resident_bytes(tensor: RoomyTensor) -> int:
    size = tensor.first * tensor.part_bytes
    is_resident = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    if _libc.mincore(tensor.address, size, is_resident):
        raise _problem("mincore")
    return bytes(is_resident).count(1) * mmap.PAGESIZE


def _map(
    address: int | None, size: int, access: int, flags: int, fd: int = -1, offset: int = 0
) -> int:
    found: int = _libc.mmap(address, size, access, flags, fd, offset)
    if found == _FAILED:
        raise _problem("mmap")
    return found


def _problem(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), call)
