"""A GPU whose memory two real processes share: a memfd stands for it, and nothing needs CUDA.

As with the real one, bytes that were copied are there only after `synchronize`, a mapping lives as
long as its process if the exporting process dies, and memory that is no longer mapped must not be
touched: that is a segmentation fault here. Handles are of no use in the process that made them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from shmllm.errors import DeviceMemoryError

UUID = "fake-gpu"
NAME = "fake-device-memory"

_MAP_FAILED = 2**64 - 1


def _libc() -> ctypes.CDLL:
    """The C library. It is no global variable, so that the engine gets these classes by value."""
    library = ctypes.CDLL(None, use_errno=True)
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    library.mmap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [address, size]
    return library


class FakeSharing:
    """A `DeviceSharing` whose every CPU is the fake GPU.

    Args:
        refusal: why memory cannot be exported; empty if it can.

    Attributes:
        exported: all memory that was exported, in order.
        log: what was done, in order: "synchronize", "export", "open", "free" and "unmap".
    """

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.exported: list[FakeExported] = []
        self.log: list[str] = []

    def uuid(self, device: Any) -> str:
        return UUID

    def export(self, num_bytes: int, device: Any) -> FakeExported:
        if self.refusal:
            raise DeviceMemoryError(self.refusal)
        self.log.append("export")
        self.exported.append(FakeExported(num_bytes, self.log))
        return self.exported[-1]

    def open(self, handle: str, num_bytes: int, device: Any) -> FakeMapped:
        self.log.append("open")
        return FakeMapped(handle, num_bytes, self.log)

    def synchronize(self, device: Any) -> None:
        self.log.append("synchronize")
        for memory in self.exported:
            memory.arrive()


class FakeExported:
    """Memory of the fake GPU, whose contents arrive at `arrive`."""

    def __init__(self, num_bytes: int, log: list[str]) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.is_freed = False
        self._log = log
        self._fd = os.memfd_create(NAME)
        os.ftruncate(self._fd, num_bytes)
        self._pages = mmap.mmap(self._fd, num_bytes)
        self._shared = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._fd}"

    def arrive(self) -> None:
        if not self.is_freed:
            self._shared.copy_(self.tensor)

    def close(self) -> None:
        if not self.is_freed:
            self.is_freed = True
            self._log.append("free")
            os.close(self._fd)


class FakeMapped:
    """A mapping of a `FakeExported` of another process."""

    def __init__(self, handle: str, num_bytes: int, log: list[str]) -> None:
        self._log = log
        self._num_bytes = num_bytes
        self._address = 0
        try:
            fd = os.open(handle, os.O_RDWR)
        except (OSError, ValueError, TypeError) as problem:
            raise DeviceMemoryError(f"{handle!r} is not a handle: {problem}") from problem
        try:
            if f"/{os.getpid()}/" in handle:
                raise DeviceMemoryError("a handle cannot be opened in the process that made it")
            if os.fstat(fd).st_size < num_bytes:
                raise DeviceMemoryError(f"the memory of {handle} is smaller")
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            address = _libc().mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address == _MAP_FAILED:
            raise DeviceMemoryError(os.strerror(ctypes.get_errno()))
        self._address = int(address)
        storage = torch._C._construct_storage_from_data_pointer(
            self._address, torch.device("cpu"), num_bytes
        )
        self.tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))

    def close(self) -> None:
        address, self._address = self._address, 0
        if address:
            self._log.append("unmap")
            assert _libc().munmap(address, self._num_bytes) == 0


def share_memory(worker: Any) -> None:
    """Runs in the engine: its memory becomes that of the fake GPU."""
    worker._core.weights.sharing = FakeSharing()


def num_mappings(worker: Any) -> int:
    """Runs in the engine: the number of mappings of other processes' memory of the fake GPU."""
    return Path("/proc/self/maps").read_text().count(NAME)
