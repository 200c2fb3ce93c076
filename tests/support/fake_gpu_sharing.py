"""Memory of fake GPUs that real processes share: each process has a fake GPU of its own."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from support.fake_gpu_operations import mark
from support.fake_sharing import FakeExported, FakeMapped
from torch import Tensor


class _Shared(FakeExported):
    """Memory whose contents are there at once: both ends are the same pages."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, [])
        self.tensor = mark(self._shared)

    def close(self) -> None:
        super().close()
        self.tensor = self._shared = torch.empty(0)


class FakeGpuSharing:
    """See `parallel.gpu_memory.Sharing`."""

    def export(self, num_bytes: int, device: Any) -> _Shared:
        return _Shared(num_bytes)

    def open(self, handle: str, num_bytes: int, device: Any) -> FakeMapped:
        memory = FakeMapped(handle, num_bytes, [])
        mark(memory.tensor)
        return memory

    def map_host(self, address: int, num_bytes: int, device: Any) -> Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return mark(torch.frombuffer(memory, dtype=torch.uint8))
