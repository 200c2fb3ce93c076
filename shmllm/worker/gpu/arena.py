"""An arena in a GPU's memory that keeps its addresses while its memory is given back.

The arena reserves addresses once, and maps chunks of memory there; chunks, since a mapping cannot
be unmapped in part. Tensors, and captured graphs that contain their addresses, are valid again
when other chunks are mapped at the same addresses.

This module owns the state of each chunk: a CUDA driver that unmaps a chunk twice, or frees one that
does not exist, corrupts the process instead of returning an error.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import Any

import torch

from shmllm.errors import EngineStartError
from shmllm.worker.arena import BumpAllocator, Contents
from shmllm.worker.gpu.host_copy import HostCopy

CHUNK_BYTES = 512 * 2**20
MIB = 2**20


class ChunkState(Enum):
    """The state of a chunk, and the driver calls that change it:

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
    """Device memory for tensors. The tensors do not keep the arena alive, so it must outlive them.

    `release(keep=True)` copies the contents to pinned host memory.

    Args:
        num_bytes: the size of all tensors that `allocate` can return, in total.
        purpose: what the memory is for, for the error message.
        device: a CUDA device.
        driver: the module `cuda.bindings.driver`, or a fake in tests.
        chunk_bytes: the smallest size of a chunk; it is rounded up to the driver's granularity.

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
        self.contents = Contents.PRESENT
        self._device = device
        self._driver = driver or _import_driver(device)
        self._allocator = BumpAllocator(num_bytes)
        self._kept: HostCopy | None = None
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
        """Return a zeroed tensor of `shape` at the next free address."""
        begin = self._allocator.allocate(shape, dtype)
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        strides = torch.empty(shape, device="meta").stride()
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        storage = torch._C._construct_storage_from_data_pointer(
            self._address + begin, self._device, num_bytes
        )
        return tensor.set_(storage, 0, shape, strides)

    def release(self, keep: bool = False) -> None:
        """Give the memory back. The tensors may not be used until `restore`.

        Raises:
            MemoryError: there is no host memory to keep the contents in; nothing changed.
        """
        if self.contents is Contents.PRESENT:
            with self._current():
                self._call("cuCtxSynchronize")  # kernels may still use it
                if keep:
                    self._kept = HostCopy(self._call, self._address, self.num_bytes)
                self._unmap_all()
            self.contents = Contents.KEPT if keep else Contents.LOST
        elif self.contents is Contents.KEPT and not keep:
            self._drop_kept()
            self.contents = Contents.LOST

    def restore(self) -> None:
        """Map memory at the same addresses again, with the kept contents or zeros.

        Raises:
            MemoryError: the device has not enough free memory; nothing changed.
        """
        if self.contents is Contents.PRESENT:
            return
        self._map_all()
        if self._kept is not None:
            with self._current():
                self._kept.copy_back(self._address)
            self._drop_kept()
        self.contents = Contents.PRESENT

    def close(self) -> None:
        """Give back the memory and the addresses. Idempotent."""
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
        """The device memory that the arena takes now, in bytes."""
        return sum(c.num_bytes for c in self._chunks if c.state is not ChunkState.ABSENT)

    def _map_all(self) -> None:
        """Map all chunks, zeroed. If that fails, map none."""
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
            # The chunks contain the bytes of earlier owners, and attention needs finite values
            # in masked slots.
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
        """Call a function of the driver, and return its value if it has one. Raises MemoryError if
        the device is out of memory, and RuntimeError for other errors."""
        result, *values = getattr(self._driver, name)(*arguments)
        codes = self._driver.CUresult
        if result == codes.CUDA_SUCCESS:
            return values[0] if values else None
        if result == codes.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(name)
        raise RuntimeError(f"{name} failed: {result!r}")

    def _current(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the device current in this thread."""
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _import_driver(device: torch.device) -> Any:
    """Import the driver's bindings. torch creates its context first, so that the arena's memory
    belongs to that context."""
    torch.zeros(1, device=device)
    return import_module("cuda.bindings.driver")  # a dependency of torch's CUDA builds
