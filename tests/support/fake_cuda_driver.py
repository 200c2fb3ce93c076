"""A fake CUDA driver with the memory of a GPU, which refuses calls in a wrong state.

Its addresses are host memory. Unmapped memory is filled with a pattern, so that a test sees memory
that was not zeroed or copied back.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from types import SimpleNamespace
from typing import Any

GRANULARITY = 2**14
PATTERN = 0xAB


class Code(enum.IntEnum):
    """Result codes of the driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


class Refusal(Exception):
    """A call that would corrupt the process with a real driver, or have undefined behaviour."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Refusal(what)


class FakeGpuMemory:
    """What several processes have of one GPU.

    Attributes:
        free_bytes: the device's free memory.
        shared: by handle, the allocation that it stands for.
    """

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.shared: dict[bytes, FakeAllocation] = {}


class FakeAllocation:
    """Memory of cuMemAlloc, which exists until nobody uses it.

    Attributes:
        address: its address, the same in all processes.
        users: the drivers of the processes that have allocated or mapped it.
    """

    def __init__(self, gpu: FakeGpuMemory, size: int, owner: FakeDriver) -> None:
        self.size = size
        self.owner: FakeDriver | None = owner
        self.users = [owner]
        self._gpu = gpu
        gpu.free_bytes -= size
        self._anchor = (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
        self.address = ctypes.addressof(self._anchor)

    def drop(self, user: FakeDriver) -> None:
        self.users.remove(user)
        if not self.users:
            self._gpu.free_bytes += self.size


class FakeIpcHandle:
    """The `CUipcMemHandle` of the bindings, which show its 64 bytes by their address only."""

    def __init__(self) -> None:
        self.content = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.content)


class FakeDriver:
    """The part of `cuda.bindings.driver` that arenas and shared memory use.

    Attributes:
        free_bytes: the device's free memory.
        calls: the names of the calls, in order.
        fail: the name of a function whose next call returns an error.
    """

    CUresult = Code
    CUipcMemHandle = FakeIpcHandle
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, free_bytes: int = 2**30, gpu: FakeGpuMemory | None = None) -> None:
        self._gpu = gpu or FakeGpuMemory(free_bytes)
        self._allocations: dict[int, FakeAllocation] = {}
        self._opened: dict[int, FakeAllocation] = {}
        self.calls: list[str] = []
        self.fail = ""
        self._memory: dict[int, tuple[int, Any]] = {}
        self._created: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, int]] = {}
        self._accessible: set[int] = set()
        self._registered: dict[int, int] = {}
        self._next_handle = 100

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("cu"):
            return value

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if self.fail == name:
                self.fail = ""
                return (Code.CUDA_ERROR_INVALID_VALUE,)
            return value(*arguments)

        return call

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:
        return SimpleNamespace(location=None, flags=0)

    def cuMemGetAllocationGranularity(self, memory: SimpleNamespace, kind: int) -> tuple[Code, int]:
        require(memory.location.id == 0, "a device")
        return Code.CUDA_SUCCESS, GRANULARITY

    def cuMemAddressReserve(
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[Code, int]:
        require(size % GRANULARITY == 0, "whole granules")
        pages = mmap.mmap(-1, size)
        anchor = (ctypes.c_char * size).from_buffer(pages)
        place = ctypes.addressof(anchor)
        ctypes.memset(place, PATTERN, size)
        self._memory[place] = (size, anchor)
        return Code.CUDA_SUCCESS, place

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Code]:
        require(self._memory[address][0] == size, "what was reserved")
        require(not any(address <= a < address + size for a in self._mapped), "nothing mapped")
        del self._memory[address]
        return (Code.CUDA_SUCCESS,)

    def cuMemCreate(
        self, size: int, memory: SimpleNamespace, flags: int
    ) -> tuple[Code, int | None]:
        require(size % GRANULARITY == 0, "whole granules")
        if size > self.free_bytes:
            return Code.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free_bytes -= size
        self._next_handle += 1
        self._created[self._next_handle] = size
        return Code.CUDA_SUCCESS, self._next_handle

    def cuMemRelease(self, handle: int) -> tuple[Code]:
        require(handle in self._created, "a handle, once")
        require(handle not in [h for _, h in self._mapped.values()], "unmapped first")
        self.free_bytes += self._created.pop(handle)
        return (Code.CUDA_SUCCESS,)

    def cuMemMap(
        self, address: int, size: int, offset: int, handle: int, flags: int
    ) -> tuple[Code]:
        require(self._created[handle] == size, "a whole chunk")
        for begin, (length, _) in self._mapped.items():
            require(address + size <= begin or begin + length <= address, "a free place")
        self._mapped[address] = (size, handle)
        return (Code.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Code]:
        require(self._mapped.get(address, (0,))[0] == size, "exactly what was mapped, once")
        del self._mapped[address]
        self._accessible.discard(address)
        ctypes.memset(address, PATTERN, size)
        return (Code.CUDA_SUCCESS,)

    def cuMemSetAccess(
        self, address: int, size: int, access: list[SimpleNamespace], count: int
    ) -> tuple[Code]:
        require(self._mapped[address][0] == size, "mapped")
        require(access[0].flags == 3, "to read and write")
        self._accessible.add(address)
        return (Code.CUDA_SUCCESS,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Code]:
        self._require_accessible(address, size)
        ctypes.memset(address, value, size)
        return (Code.CUDA_SUCCESS,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Code]:
        require(address not in self._registered, "once")
        self._registered[address] = size
        return (Code.CUDA_SUCCESS,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Code, int]:
        require(address in self._registered, "registered")
        require(flags == 0, "the only flags")
        return Code.CUDA_SUCCESS, address

    def cuMemHostUnregister(self, address: int) -> tuple[Code]:
        require(address in self._registered, "registered")
        del self._registered[address]
        return (Code.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, to: int, source: int, size: int) -> tuple[Code]:
        require(self._registered[to] == size, "pinned")
        self._require_accessible(source, size)
        ctypes.memmove(to, source, size)
        return (Code.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, to: int, source: int, size: int) -> tuple[Code]:
        require(self._registered[source] == size, "pinned")
        self._require_accessible(to, size)
        ctypes.memmove(to, source, size)
        return (Code.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Code]:
        return (Code.CUDA_SUCCESS,)

    def of_another_process(self) -> FakeDriver:
        """The driver of another process with the same GPU."""
        return FakeDriver(gpu=self._gpu)

    @property
    def free_bytes(self) -> int:
        return self._gpu.free_bytes

    @free_bytes.setter
    def free_bytes(self, number: int) -> None:
        self._gpu.free_bytes = number

    def die(self) -> None:
        """The process is killed; it must not use its memory any more."""
        for allocation in self._allocations.values():
            allocation.owner = None
            allocation.drop(self)
        self._allocations.clear()

    def cuMemAlloc(self, size: int) -> tuple[Code, int | None]:
        if size > self.free_bytes:
            return Code.CUDA_ERROR_OUT_OF_MEMORY, None
        allocation = FakeAllocation(self._gpu, size, self)
        self._allocations[allocation.address] = allocation
        return Code.CUDA_SUCCESS, allocation.address

    def cuMemFree(self, address: int) -> tuple[Code]:
        require(address in self._allocations, "an allocation, once")
        allocation = self._allocations.pop(address)
        require(allocation.users == [self], "unmapped by all other processes first")
        allocation.owner = None
        allocation.drop(self)
        return (Code.CUDA_SUCCESS,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Code, FakeIpcHandle]:
        require(self._allocations[address].size % 2**21 == 0, "an allocation that has no neighbour")
        handle = FakeIpcHandle()
        handle.content.raw = address.to_bytes(8, "little").rjust(64, b"\xc1")
        self._gpu.shared[handle.content.raw] = self._allocations[address]
        return Code.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle: FakeIpcHandle, flags: int) -> tuple[Code, int | None]:
        require(flags == 1, "the only flag")
        allocation = self._gpu.shared.get(handle.content.raw)
        if allocation is None or allocation.owner is None:
            return Code.CUDA_ERROR_INVALID_VALUE, None
        if allocation.owner is self:
            return Code.CUDA_ERROR_INVALID_CONTEXT, None
        require(allocation.address not in self._opened, "mapped once")
        self._opened[allocation.address] = allocation
        allocation.users.append(self)
        return Code.CUDA_SUCCESS, allocation.address

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Code]:
        require(address in self._opened, "a mapping, once")
        self._opened.pop(address).drop(self)
        return (Code.CUDA_SUCCESS,)

    def cuMemGetAddressRange(self, address: int) -> tuple[Code, int, int]:
        allocation = (self._allocations | self._opened)[address]
        return Code.CUDA_SUCCESS, allocation.address, allocation.size

    def _require_accessible(self, address: int, size: int) -> None:
        while size > 0:
            begins = [b for b in self._accessible if b <= address < b + self._mapped[b][0]]
            require(len(begins) == 1, "memory is there")
            length = begins[0] + self._mapped[begins[0]][0] - address
            address, size = address + length, size - length

    @property
    def is_clean(self) -> bool:
        """Whether all memory was given back."""
        mapped = self._mapped or self._opened
        return not (
            self._memory or self._created or mapped or self._registered or self._allocations
        )
