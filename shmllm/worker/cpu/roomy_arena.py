"""An arena whose tensors of blocks have room behind them: addresses at which blocks of other
engines are mapped, so that kernels find these by ids like the engine's own."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from shmllm.shared_kv.memory_calls import (
    NO_ACCESS,
    POPULATE_READ,
    RESERVED,
    advise,
    map_memory,
    protect,
    unmap_memory,
)
from shmllm.worker.arena import Contents, resident_bytes_at

ROOM_BYTES = 2**40
"""The addresses that all tensors of an arena reserve. They take no memory."""
MOST_IDS = 2**24


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
        map_memory(size, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset, at=address)
        advise(address, size, mmap.MADV_DONTDUMP)
        advise(address, size, POPULATE_READ)  # else the first step that reads the blocks waits

    def unmap(self, first: int, count: int) -> None:
        """End that."""
        address, size = self.address + first * self.part_bytes, count * self.part_bytes
        map_memory(size, NO_ACCESS, RESERVED, at=address)


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
        address = map_memory(size, NO_ACCESS, RESERVED)
        self.tensors.append(RoomyTensor(address, count, part_bytes, first, room))
        protect(address, own, mmap.PROT_READ | mmap.PROT_WRITE)
        memory: Any = (ctypes.c_ubyte * (count * part_bytes)).from_address(address)
        memory.arena = self  # the tensor keeps the addresses
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def release(self, keep: bool = False) -> None:
        if self.contents is Contents.LOST:
            return
        self.contents = Contents.KEPT if keep else Contents.LOST
        if not keep:
            for each in self.tensors:
                advise(each.address, each.first * each.part_bytes, mmap.MADV_DONTNEED)

    def restore(self) -> None:
        self.contents = Contents.PRESENT

    @property
    def resident_bytes(self) -> int:
        """The bytes of the own pages that were touched."""
        return sum(
            resident_bytes_at(each.address, each.first * each.part_bytes) for each in self.tensors
        )

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for each in self.tensors:
                unmap_memory(each.address, (each.first + each.room) * each.part_bytes)
