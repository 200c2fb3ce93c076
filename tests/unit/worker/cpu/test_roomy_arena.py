"""An arena with room behind its tensors, where blocks of files are mapped."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from shmllm.worker.arena import Contents
from shmllm.worker.cpu.roomy_arena import RoomyArena

PART = 1536  # eight of them are whole pages
COUNT = 5


@pytest.fixture
def arena() -> RoomyArena:
    return RoomyArena(COUNT * PART, PART)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.pwrite(fd, bytes(mmap.PAGESIZE) + bytes(range(16)) * PART, 0)
    yield fd
    os.close(fd)


def at(tensor: torch.Tensor, block_id: int) -> bytes:
    """What a kernel reads at the address of a block."""
    return ctypes.string_at(tensor.data_ptr() + block_id * PART, PART)


def test_tensors_are_zeroed_at_the_begin_of_a_page(arena: RoomyArena) -> None:
    tensor = arena.allocate((COUNT, PART), torch.uint8)
    assert tensor.shape == (COUNT, PART)
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not tensor.any()


def test_blocks_of_a_file_are_read_by_their_ids(arena: RoomyArena, file: int) -> None:
    tensor = arena.allocate((COUNT, PART), torch.uint8)
    tensor.fill_(7)
    [room] = arena.tensors
    assert room.first == 8
    room.map(file, mmap.PAGESIZE, 16, 8)
    assert at(tensor, 16) == bytes(range(16)) * (PART // 16)
    os.pwrite(file, b"\xff" * PART, mmap.PAGESIZE + 2 * PART)
    assert at(tensor, 18) == b"\xff" * PART
    room.unmap(16, 8)
    room.map(file, mmap.PAGESIZE, 8, 8)
    assert at(tensor, 10) == b"\xff" * PART
    assert bool((tensor == 7).all())


def test_released_memory_is_restored_as_zeros(arena: RoomyArena, file: int) -> None:
    tensor = arena.allocate((COUNT, PART), torch.uint8)
    [room] = arena.tensors
    room.map(file, mmap.PAGESIZE, 8, 8)
    tensor.fill_(1)
    assert arena.resident_bytes == 2 * mmap.PAGESIZE
    arena.release(keep=True)
    assert arena.contents is Contents.KEPT
    assert bool(tensor.all())
    arena.release()
    assert (arena.contents, arena.resident_bytes) == (Contents.LOST, 0)
    arena.restore()
    assert arena.contents is Contents.PRESENT
    assert not tensor.any()
    assert at(tensor, 8) == bytes(range(16)) * (PART // 16), "a file keeps its contents"


def test_mapped_files_are_not_counted(arena: RoomyArena, file: int) -> None:
    arena.allocate((COUNT, PART), torch.uint8)
    arena.tensors[0].map(file, mmap.PAGESIZE, 8, 8)
    assert arena.resident_bytes == 0


def test_a_file_that_cannot_be_mapped_is_an_error(arena: RoomyArena, file: int) -> None:
    arena.allocate((COUNT, PART), torch.uint8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        arena.tensors[0].map(999_999, 0, 8, 8)
    with pytest.raises(OSError, match="Invalid argument"):
        arena.tensors[0].map(file, 100, 8, 8)


def test_a_tensor_keeps_its_addresses() -> None:
    tensor = RoomyArena(COUNT * PART, PART).allocate((COUNT, PART), torch.uint8)
    gc.collect()
    tensor.fill_(3)
    assert bool((tensor == 3).all())
