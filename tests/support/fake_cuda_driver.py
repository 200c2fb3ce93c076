"""A CUDA driver without a GPU, strict about states: it plays the memory of one.

Its addresses are host memory. What is not mapped is filled with a pattern, so that whatever
is not zeroed or copied back is seen.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from types import SimpleNamespace

GRANULARITY = 2**14
PATTERN = 0xAB


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
        require(not any(address <= a < address + size for a in self._mapped), "nothing mapped")
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
