"""An arena in a GPU's memory, whose addresses stay when the memory is given back.

Addresses are reserved once. Memory is created in chunks and mapped there, since a mapping
cannot be unmapped in part; the tensors, and the captured graphs that hold their addresses,
are valid again when other chunks are mapped at the same place.

Owns the state of each chunk: a driver that is asked twice to unmap, or to free what is gone,
corrupts the process instead of answering. Must not know what the memory is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import Any

import torch

from shmllm.errors import EngineStartError
from shmllm.worker.arena import BumpAllocator, Contents

CHUNK_BYTES = 64 * 2**20
MIB = 2**20


class ChunkState(Enum):
    """
    ABSENT  -> CREATED  cuMemCreate        CREATED -> ABSENT   cuMemRelease
    CREATED -> MAPPED   cuMemMap           MAPPED  -> CREATED  cuMemUnmap
    """

    ABSENT = auto()
    CREATED = auto()
    MAPPED = auto()


@dataclass(slots=True)
class _Chunk:
    address: int
    num_bytes: int
    state: ChunkState = ChunkState.ABSENT
    handle: Any = None


class CudaArena:
    """Device memory for tensors. It has to outlive them: they do not keep it alive.

    What is kept while it sleeps lies in pinned host memory: mapped for it and registered,
    since torch's own allocator rounds up to powers of two and keeps what is freed.

    Args:
        num_bytes: the most that `allocate` can give out.
        purpose: what it holds, for the error message.
        device: a CUDA device.
        driver: `cuda.bindings.driver`; tests have another.
        chunk_bytes: of a chunk, at least.

    Raises:
        EngineStartError: the device does not have that much memory.
    """

    def __init__(
        self,
        num_bytes: int,
        purpose: str,
        device: torch.device,
        driver: Any = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.HERE
        self._device = device
        self._driver = driver or _import_driver(device)
        self._allocator = BumpAllocator(num_bytes)
        self._kept: _HostCopy | None = None
        self._property, self._access = self._describe_memory()
        granularity = self._granularity()
        size = _round_up(max(num_bytes, 1), granularity)
        self._address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        self._reserved_bytes = size
        step = _round_up(chunk_bytes, granularity)
        self._chunks = [
            _Chunk(self._address + begin, min(step, size - begin)) for begin in range(0, size, step)
        ]
        try:
            self._map_all()
        except MemoryError as problem:
            self.close()
            raise EngineStartError(f"no memory for {purpose}: {problem}") from problem

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor of `shape` at the next free address."""
        begin = self._allocator.allocate(shape, dtype)
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        strides = torch.empty(shape, device="meta").stride()
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        storage = torch._C._construct_storage_from_data_pointer(
            self._address + begin, self._device, num_bytes
        )
        return tensor.set_(storage, 0, shape, strides)

    def release(self, keep: bool = False) -> None:
        """Give the memory back. Nobody may use the tensors until `restore`.

        Raises:
            MemoryError: there is no host memory to keep the contents in; nothing changed.
        """
        if self.contents is Contents.HERE:
            with self._current():
                self._call("cuCtxSynchronize")  # kernels may still use it
                if keep:
                    self._kept = _HostCopy(self._call, self._address, self.num_bytes)
                self._unmap_all()
            self.contents = Contents.KEPT if keep else Contents.LOST
        elif self.contents is Contents.KEPT and not keep:
            self._drop_kept()
            self.contents = Contents.LOST

    def restore(self) -> None:
        """Have memory at the same addresses again: as kept, else zeroed.

        Raises:
            MemoryError: the device has not enough; nothing changed.
        """
        if self.contents is Contents.HERE:
            return
        self._map_all()
        if self._kept is not None:
            with self._current():
                self._kept.copy_back(self._address)
            self._drop_kept()
        self.contents = Contents.HERE

    def close(self) -> None:
        """Give everything back, the addresses too. Idempotent."""
        if not self._reserved_bytes:
            return
        with self._current():
            self._call("cuCtxSynchronize")
            self._unmap_all()
        self._drop_kept()
        self._call("cuMemAddressFree", self._address, self._reserved_bytes)
        self._reserved_bytes = 0
        self.contents = Contents.LOST

    @property
    def resident_bytes(self) -> int:
        """Device memory that is there now."""
        return sum(c.num_bytes for c in self._chunks if c.state is not ChunkState.ABSENT)

    def _map_all(self) -> None:
        """All chunks or none, zeroed."""
        try:
            for chunk in self._chunks:
                self._map(chunk)
        except Exception as problem:
            missing = self._reserved_bytes - self.resident_bytes
            self._unmap_all()
            if not isinstance(problem, MemoryError):
                raise
            raise MemoryError(
                f"{self._reserved_bytes / MIB:,.0f} MiB of device memory were asked for, and the "
                f"last {missing / MIB:,.0f} MiB are not free"
            ) from None
        with self._current():
            # cuMemCreate leaves what others had there; what attention masks must be finite.
            self._call("cuMemsetD8", self._address, 0, self._reserved_bytes)
            self._call("cuCtxSynchronize")

    def _map(self, chunk: _Chunk) -> None:
        if chunk.state is ChunkState.ABSENT:
            chunk.handle = self._call("cuMemCreate", chunk.num_bytes, self._property, 0)
            chunk.state = ChunkState.CREATED
        if chunk.state is ChunkState.CREATED:
            self._call("cuMemMap", chunk.address, chunk.num_bytes, 0, chunk.handle, 0)
            chunk.state = ChunkState.MAPPED
            self._call("cuMemSetAccess", chunk.address, chunk.num_bytes, [self._access], 1)

    def _unmap_all(self) -> None:
        for chunk in self._chunks:
            if chunk.state is ChunkState.MAPPED:
                self._call("cuMemUnmap", chunk.address, chunk.num_bytes)
                chunk.state = ChunkState.CREATED
            if chunk.state is ChunkState.CREATED:
                self._call("cuMemRelease", chunk.handle)
                chunk.state, chunk.handle = ChunkState.ABSENT, None

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _describe_memory(self) -> tuple[Any, Any]:
        driver = self._driver
        memory = driver.CUmemAllocationProp()
        memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        memory.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        memory.location.id = self._device.index or 0
        access = driver.CUmemAccessDesc()
        access.location = memory.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return memory, access

    def _granularity(self) -> int:
        kinds = self._driver.CUmemAllocationGranularity_flags
        least = kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._property, least))

    def _call(self, name: str, *arguments: Any) -> Any:
        """A call of the driver: its value, if it has one."""
        result, *values = getattr(self._driver, name)(*arguments)
        codes = self._driver.CUresult
        if result == codes.CUDA_SUCCESS:
            return values[0] if values else None
        if result == codes.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(name)
        raise RuntimeError(f"{name} failed: {result!r}")

    def _current(self) -> AbstractContextManager[Any]:
        """The device's context is this thread's."""
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()


class _HostCopy:
    """Device memory as it was, in pinned pages."""

    def __init__(self, call: Callable[..., Any], address: int, num_bytes: int) -> None:
        self._call = call
        self._num_bytes = num_bytes
        try:
            self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as problem:
            raise MemoryError(
                f"no {num_bytes / MIB:,.0f} MiB of host memory to keep the contents in"
            ) from problem
        self._anchor = (ctypes.c_char * num_bytes).from_buffer(self._pages)
        self._address = ctypes.addressof(self._anchor)
        self._call("cuMemHostRegister", self._address, num_bytes, 0)
        self._call("cuMemcpyDtoH", self._address, address, num_bytes)

    def copy_back(self, address: int) -> None:
        self._call("cuMemcpyHtoD", address, self._address, self._num_bytes)

    def close(self) -> None:
        self._call("cuMemHostUnregister", self._address)
        del self._anchor
        self._pages.close()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _import_driver(device: torch.device) -> Any:
    """After torch has made its context, which the memory then belongs to."""
    torch.zeros(1, device=device)
    return import_module("cuda.bindings.driver")  # comes with torch's builds for CUDA
