"""The arena of a GPU without one: a driver that is strict about states plays its memory.

Its addresses are host memory. What is not mapped is filled with a pattern, so that whatever
is not zeroed or copied back is seen.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from types import SimpleNamespace

import pytest
import torch
from arena_conformance import ArenaConformance

from shmllm.errors import EngineStartError
from shmllm.worker.arena import Contents
from shmllm.worker.cuda_arena import CudaArena

GRANULARITY = 2**14
PATTERN = 0xAB
HOST = torch.device("cpu")


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Refusal(Exception):
    """What a real driver would answer with a corrupted process, or not at all."""


def require(condition, what):
    if not condition:
        raise Refusal(what)


class FakeDriver:
    """`cuda.bindings.driver`, as far as the arena uses it.

    Attributes:
        free_bytes: of the device.
        calls: names, in order.
        fail: a name whose next call answers with an error.
    """

    CUresult = Code
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, free_bytes=2**30):
        self.free_bytes = free_bytes
        self.calls = []
        self.fail = ""
        self._memory = {}
        self._created = {}
        self._mapped = {}
        self._accessible = set()
        self._registered = {}
        self._next_handle = 100

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if not name.startswith("cu"):
            return value

        def call(*arguments):
            self.calls.append(name)
            if self.fail == name:
                self.fail = ""
                return (Code.CUDA_ERROR_INVALID_VALUE,)
            return value(*arguments)

        return call

    @staticmethod
    def CUmemAllocationProp():
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    @staticmethod
    def CUmemAccessDesc():
        return SimpleNamespace(location=None, flags=0)

    def cuMemGetAllocationGranularity(self, memory, kind):
        require(memory.location.id == 0, "a device")
        return Code.CUDA_SUCCESS, GRANULARITY

    def cuMemAddressReserve(self, size, alignment, address, flags):
        require(size % GRANULARITY == 0, "whole granules")
        pages = mmap.mmap(-1, size)
        anchor = (ctypes.c_char * size).from_buffer(pages)
        place = ctypes.addressof(anchor)
        ctypes.memset(place, PATTERN, size)
        self._memory[place] = (size, anchor)
        return Code.CUDA_SUCCESS, place

    def cuMemAddressFree(self, address, size):
        require(self._memory[address][0] == size, "what was reserved")
        require(not self._mapped, "nothing mapped")
        del self._memory[address]
        return (Code.CUDA_SUCCESS,)

    def cuMemCreate(self, size, memory, flags):
        require(size % GRANULARITY == 0, "whole granules")
        if size > self.free_bytes:
            return Code.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free_bytes -= size
        self._next_handle += 1
        self._created[self._next_handle] = size
        return Code.CUDA_SUCCESS, self._next_handle

    def cuMemRelease(self, handle):
        require(handle in self._created, "a handle, once")
        require(handle not in [h for _, h in self._mapped.values()], "unmapped first")
        self.free_bytes += self._created.pop(handle)
        return (Code.CUDA_SUCCESS,)

    def cuMemMap(self, address, size, offset, handle, flags):
        require(self._created[handle] == size, "a whole chunk")
        for begin, (length, _) in self._mapped.items():
            require(address + size <= begin or begin + length <= address, "a free place")
        self._mapped[address] = (size, handle)
        return (Code.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):
        require(self._mapped.get(address, (0,))[0] == size, "exactly what was mapped, once")
        del self._mapped[address]
        self._accessible.discard(address)
        ctypes.memset(address, PATTERN, size)
        return (Code.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, access, count):
        require(self._mapped[address][0] == size, "mapped")
        require(access[0].flags == 3, "to read and write")
        self._accessible.add(address)
        return (Code.CUDA_SUCCESS,)

    def cuMemsetD8(self, address, value, size):
        self._require_accessible(address, size)
        ctypes.memset(address, value, size)
        return (Code.CUDA_SUCCESS,)

    def cuMemHostRegister(self, address, size, flags):
        require(address not in self._registered, "once")
        self._registered[address] = size
        return (Code.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address):
        require(address in self._registered, "registered")
        del self._registered[address]
        return (Code.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, to, source, size):
        require(self._registered[to] == size, "pinned")
        self._require_accessible(source, size)
        ctypes.memmove(to, source, size)
        return (Code.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, to, source, size):
        require(self._registered[source] == size, "pinned")
        self._require_accessible(to, size)
        ctypes.memmove(to, source, size)
        return (Code.CUDA_SUCCESS,)

    def cuCtxSynchronize(self):
        return (Code.CUDA_SUCCESS,)

    def _require_accessible(self, address, size):
        while size > 0:
            require(address in self._accessible, "memory is there")
            length = self._mapped[address][0]
            address, size = address + length, size - length

    @property
    def is_clean(self):
        return not (self._memory or self._created or self._mapped or self._registered)


@pytest.fixture
def driver():
    return FakeDriver()


class TestCudaArena(ArenaConformance):
    """In chunks, so that there are several."""

    @pytest.fixture(autouse=True)
    def use(self, driver):
        self.driver = driver

    def make(self, num_bytes):
        return CudaArena(num_bytes, "a test", HOST, self.driver, chunk_bytes=3 * GRANULARITY)

    def test_it_is_made_of_chunks_which_all_go(self, arena, driver):
        num_chunks = driver.calls.count("cuMemMap")
        assert num_chunks > 10
        free = driver.free_bytes
        arena.release()
        assert driver.calls.count("cuMemUnmap") == num_chunks
        assert driver.free_bytes == free + arena._reserved_bytes

    def test_what_runs_ends_before_memory_goes(self, arena, driver):
        driver.calls.clear()
        arena.release()
        assert driver.calls[0] == "cuCtxSynchronize"

    @pytest.mark.parametrize("state", ["awake", "kept", "lost"])
    def test_closing_leaves_nothing_whatever_the_state(self, arena, driver, state):
        if state != "awake":
            arena.release(keep=state == "kept")
        arena.close()
        arena.close()
        assert driver.is_clean
        assert driver.free_bytes == 2**30

    @pytest.mark.parametrize("keep", [True, False])
    def test_too_little_memory_for_waking_leaves_it_asleep(self, arena, tensors, driver, keep):
        self.write(tensors)
        expected = self.values(tensors) if keep else [0.0] * len(tensors)
        arena.release(keep)
        taken, driver.free_bytes = driver.free_bytes, 10 * GRANULARITY
        for _ in range(2):
            with pytest.raises(MemoryError, match="MiB are not free"):
                arena.restore()
            assert arena.resident_bytes == 0
            assert driver.free_bytes == 10 * GRANULARITY
            assert arena.contents is (Contents.KEPT if keep else Contents.LOST)
        driver.free_bytes = taken
        arena.restore()
        assert self.values(tensors) == expected

    def test_a_failed_call_can_be_repeated(self, arena, tensors, driver):
        self.write(tensors)
        expected = self.values(tensors)
        for name in ("cuMemUnmap", "cuMemRelease"):
            driver.fail = name
            with pytest.raises(RuntimeError, match=name):
                arena.release()
            arena.release()
            for again in ("cuMemMap", "cuMemSetAccess"):
                driver.fail = again
                with pytest.raises(RuntimeError, match=again):
                    arena.restore()
            arena.restore()
            self.write(tensors)
            assert self.values(tensors) == expected
        arena.close()
        assert driver.is_clean

    def test_the_fake_is_strict(self, driver):
        size = GRANULARITY
        _, place = driver.cuMemAddressReserve(size, 0, 0, 0)
        _, handle = driver.cuMemCreate(size, None, 0)
        driver.cuMemMap(place, size, 0, handle, 0)
        for refused in (
            lambda: driver.cuMemMap(place, size, 0, handle, 0),
            lambda: driver.cuMemRelease(handle),
            lambda: driver.cuMemsetD8(place, 0, size),
            lambda: driver.cuMemAddressFree(place, size),
        ):
            with pytest.raises(Refusal):
                refused()


def test_too_little_memory_at_the_start_names_the_purpose_and_leaves_nothing():
    driver = FakeDriver(free_bytes=5 * GRANULARITY)
    with pytest.raises(EngineStartError, match=r"the weights: 1 MiB of device memory"):
        CudaArena(2**20, "the weights", HOST, driver, chunk_bytes=GRANULARITY)
    assert driver.is_clean
