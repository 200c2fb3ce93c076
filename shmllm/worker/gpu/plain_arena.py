"""An arena for a device that cannot give memory back and keep its addresses.

The arena is one allocation of torch that lives as long as the engine. All features but sleeping
work with it.
"""

from __future__ import annotations

import math

import torch

from shmllm.errors import EngineStartError, RequestError
from shmllm.worker.arena import BumpAllocator, Contents


class PlainArena:
    """Device memory for tensors that is never given back.

    Args:
        num_bytes: the size of all tensors that `allocate` can return, in total.
        purpose: what the memory is for, for the error message.
        device: the device of the memory.
        reason: why the engine has no `CudaArena`, for the error message of `release`.

    Raises:
        EngineStartError: the device does not have that much memory.
    """

    def __init__(self, num_bytes: int, purpose: str, device: torch.device, reason: str) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.PRESENT
        self._reason = reason
        self._allocator = BumpAllocator(num_bytes)
        try:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as problem:
            raise EngineStartError(
                f"no memory for {purpose}: {num_bytes / 2**20:,.0f} MiB were asked for, and "
                f"{device} refused ({str(problem).splitlines()[0]})"
            ) from problem

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor of `shape` at the next free address."""
        begin, size = self._allocator.allocate(shape, dtype), math.prod(shape) * dtype.itemsize
        return self._memory[begin : begin + size].view(dtype).view(shape)

    def release(self, keep: bool = False) -> None:
        """Raise RequestError: this memory cannot be given back."""
        raise RequestError(
            "this engine cannot sleep: its memory is a plain allocation, because "
            f"{self._reason}; sleeping needs the package cuda-bindings and a driver with "
            "virtual memory"
        )

    def restore(self) -> None:
        """Do nothing: the memory was not given back."""

    @property
    def resident_bytes(self) -> int:
        """The size of the arena, in bytes."""
        return self.num_bytes
