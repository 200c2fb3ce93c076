"""One flat piece of memory at a fixed address, from which tensors are cut.

Weights live in one arena and keys and values in another. The pages come from the kernel
zeroed and only when touched, so a large arena costs what is used of it, and slots of the
cache that nobody wrote yet are finite.
"""

from __future__ import annotations

import math
import mmap

import torch

from shmllm.errors import EngineStartError

ALIGNMENT_BYTES = 64


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `Arena.take(shape, dtype)` uses up."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class CountingAllocator:
    """Stands in for an arena to learn how large it must be: gives out meta tensors."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_bytes += padded_bytes(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


class Arena:
    """Host memory for tensors.

    Args:
        num_bytes: the most that `take` can give out.
        purpose: what it holds, for the error message.

    Raises:
        EngineStartError: the machine does not give that much memory.
    """

    def __init__(self, num_bytes: int, purpose: str) -> None:
        self.num_bytes = num_bytes
        self._used_bytes = 0
        try:
            self._memory = mmap.mmap(-1, max(num_bytes, 1))
        except OSError as problem:
            raise EngineStartError(
                f"no memory for {purpose}: {num_bytes / 2**20:,.0f} MiB were asked for and "
                f"the system refused ({problem.strerror})"
            ) from problem

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor of `shape` at the next free address."""
        size = padded_bytes(shape, dtype)
        assert self._used_bytes + size <= self.num_bytes, "the arena was counted too small"
        flat = torch.frombuffer(
            self._memory, dtype=dtype, count=math.prod(shape), offset=self._used_bytes
        )
        self._used_bytes += size
        return flat.view(shape)
