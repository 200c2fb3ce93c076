"""An arena for a device whose memory cannot be given back while its addresses stay.

One allocation of torch, for as long as the engine lives. All but sleeping works with it.
"""

from __future__ import annotations

import math

import torch

from shmllm.errors import EngineStartError, RequestError
from shmllm.worker.arena import BumpAllocator, Contents


class PlainArena:
    """
    Args:
        num_bytes: the most that `allocate` can give out.
        purpose: what it holds, for the error message.
        device: whose memory it is.
        reason: why it is not an arena that sleeps, for the error message.

    Raises:
        EngineStartError: the device does not have that much memory.
    """

    def __init__(self, num_bytes: int, purpose: str, device: torch.device, reason: str) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.HERE
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
        """A zeroed tensor of `shape` at the next free address."""
        begin, size = self._allocator.allocate(shape, dtype), math.prod(shape) * dtype.itemsize
        return self._memory[begin : begin + size].view(dtype).view(shape)

    def release(self, keep: bool = False) -> None:
        """
        Raises:
            RequestError: always.
        """
        raise RequestError(
            "this engine cannot sleep: its memory is a plain allocation, because "
            f"{self._reason}; sleeping needs the package cuda-bindings and a driver with "
            "virtual memory"
        )

    def restore(self) -> None:
        """Nothing was given back."""

    @property
    def resident_bytes(self) -> int:
        """All of it, always."""
        return self.num_bytes
