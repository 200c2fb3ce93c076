"""The memory of a group whose ranks have a GPU each: what `memory` has, and memory of the GPUs.

Each rank allocates memory on its GPU and writes the handle of it into an array of the group; the
others map it. All GPUs are in one machine, and can read and write each other's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shmllm.errors import DeviceMemoryError, EngineStartError
from shmllm.ipc.device_memory import CudaSharing
from shmllm.ipc.words import WordTable
from shmllm.parallel.memory import GroupMemory
from shmllm.worker.gpu.device import Device

HANDLES, READY = "handles of device memory", "ranks whose handle is there"
HANDLE_LETTERS = 128
"""The length of a handle as a text."""
LOOK_S = 0.002
"""How often a rank looks for the handles of the others."""


class Memory(Protocol):
    """Memory of a GPU, in the process that allocated it or in another one."""

    tensor: Any

    def close(self) -> None: ...


class Exported(Memory, Protocol):
    """Memory of this process's GPU."""

    handle: str


class Sharing(Protocol):
    """Shares memory of GPUs between processes; see `ipc.device_memory.CudaSharing`."""

    def export(self, num_bytes: int, device: Any) -> Exported: ...

    def open(self, handle: str, num_bytes: int, device: Any) -> Memory: ...

    def map_host(self, address: int, num_bytes: int, device: Any) -> Any: ...


class GpuGroupMemory(GroupMemory):
    """See `worker.gpu.group.DeviceGroup`.

    Attributes:
        make_sharing: makes what shares memory of GPUs; tests replace it.
    """

    make_sharing: Callable[[], Sharing] = CudaSharing

    def __init__(self, fd: int, rank: int, size: int, is_pipeline: bool = False) -> None:
        super().__init__(fd, rank, size, is_pipeline)
        self._sharing = type(self).make_sharing()
        self._own: Exported | None = None
        self._others: list[Memory] = []
        if rank == 0:
            self.array(HANDLES, size, HANDLE_LETTERS, dtype="uint8")
            self.array(READY, size)

    def share(self, num_bytes: int, device: Device) -> Sequence[Tensor]:
        """See `DeviceGroup.share`."""
        assert self._own is None, "the memory is shared once"
        try:
            return self._share(num_bytes, device)
        except DeviceMemoryError as problem:
            raise EngineStartError(
                f"the GPUs of tensor_parallel_size {self.size} cannot share memory: {problem}; "
                "they need NVLink, or another link by which they map each other's memory, the "
                "package cuda-bindings, and, in a container, one IPC namespace"
            ) from problem

    def _share(self, num_bytes: int, device: Device) -> list[Tensor]:
        handles = self.found(HANDLES)
        ready = WordTable(self.found(READY).data.cast("B"), 0, self.size)
        self._own = own = self._sharing.export(num_bytes, device.torch_device)
        own.tensor.zero_()
        device.synchronize()
        handles[self.rank] = list(own.handle.encode().ljust(HANDLE_LETTERS))
        ready.store(self.rank, 1)
        while not all(ready.load_all()):
            if self.has_ended:
                raise EngineStartError("another rank of the group has ended")
            time.sleep(LOOK_S)
        found = []
        for rank in range(self.size):
            memory: Memory = own
            if rank != self.rank:
                text = bytes(handles[rank]).decode().rstrip()
                memory = self._sharing.open(text, num_bytes, device.torch_device)
                self._others.append(memory)
            found.append(memory.tensor)
        return found

    def ended_word(self, device: Device) -> Tensor:
        """See `DeviceGroup.ended_word`."""
        mapped: Tensor = self._sharing.map_host(
            int(self.ended.ctypes.data), self.ended.nbytes, device.torch_device
        )
        return mapped.view(torch.int64)

    def close(self) -> None:
        """See `GroupMemory.close`. The memory of the GPUs must not be used any more, and, where
        this rank has allocated it, the other ranks must have ended."""
        for memory in self._others:
            memory.close()
        if self._own is not None:
            self._own.close()
        self._others, self._own = [], None
        super().close()
