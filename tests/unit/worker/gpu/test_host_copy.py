"""The copy of a GPU's memory in host memory, on a fake CUDA driver."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from support.fake_cuda_driver import Code, FakeDriver

from shmllm.worker.gpu import host_copy
from shmllm.worker.gpu.arena import CudaArena

NUM_BYTES = 11 * mmap.PAGESIZE


class Driver(FakeDriver):
    """Counts the pages that exist when memory is registered."""

    num_present = 0

    def cuMemHostRegister(self, address, size, flags):
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        length = ctypes.c_size_t(size)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), length, pages) == 0
        self.num_present += sum(byte & 1 for byte in pages.raw[: len(pages)])
        return super().cuMemHostRegister(address, size, flags)


@pytest.mark.parametrize("part_bytes", [mmap.PAGESIZE, 4 * mmap.PAGESIZE, 2**30])
def test_the_pages_exist_before_the_driver_registers_them(monkeypatch, part_bytes):
    monkeypatch.setattr(host_copy, "PART_BYTES", part_bytes)
    driver = Driver()
    arena = CudaArena(NUM_BYTES, "a test", torch.device("cpu"), driver)
    tensor = arena.allocate((NUM_BYTES,), torch.uint8)
    tensor.copy_(torch.arange(NUM_BYTES) % 251)
    arena.release(keep=True)
    assert driver.num_present == NUM_BYTES // mmap.PAGESIZE
    arena.restore()
    assert torch.equal(tensor, (torch.arange(NUM_BYTES) % 251).byte())
    arena.close()


def test_a_refusal_in_the_middle_leaves_nothing_registered(monkeypatch):
    monkeypatch.setattr(host_copy, "PART_BYTES", mmap.PAGESIZE)

    class Refusing(FakeDriver):
        def cuMemHostRegister(self, address, size, flags):
            if len(self._registered) == 3:
                return (Code.CUDA_ERROR_OUT_OF_MEMORY,)
            return super().cuMemHostRegister(address, size, flags)

    driver = Refusing()
    arena = CudaArena(NUM_BYTES, "a test", torch.device("cpu"), driver)
    tensor = arena.allocate((NUM_BYTES,), torch.uint8).fill_(7)
    with pytest.raises(MemoryError):
        arena.release(keep=True)
    assert not driver._registered
    assert (tensor == 7).all()
    arena.close()
