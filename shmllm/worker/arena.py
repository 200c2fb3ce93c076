"""One flat piece of memory at a fixed address, from which tensors are cut.

Weights live in one arena and keys and values in another. An arena can give its memory back
and have it again at the same addresses, so that whatever points into it stays valid. New
memory is zeroed, so that slots of the cache that nobody wrote yet are finite.

Owns the interface, and the arena of a CPU, whose pages come from the kernel when they are
first touched: a large one costs what is used of it. `cuda_arena` has a GPU's.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Protocol

import torch

ALIGNMENT_BYTES = 64


class Contents(Enum):
    """
    HERE   -> KEPT   release(keep=True): the memory is given back, but for what a CPU keeps
    HERE   -> LOST   release(keep=False)
    KEPT   -> LOST   release(keep=False)
    KEPT   -> HERE   restore: as they were
    LOST   -> HERE   restore: zeros

    Every other call changes nothing.
    """

    HERE = auto()
    KEPT = auto()
    LOST = auto()


class Arena(Protocol):
    """Memory for tensors.

    Attributes:
        num_bytes: the most that `allocate` can give out.
        contents: what has become of them.
    """

    num_bytes: int
    contents: Contents

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor of `shape` at the next free address."""

    def release(self, keep: bool = False) -> None:
        """Give the memory back. Nobody may use the tensors until `restore`."""

    def restore(self) -> None:
        """Have memory at the same addresses again.

        Raises:
            MemoryError: there is not enough; nothing changed.
        """

    @property
    def resident_bytes(self) -> int:
        """Memory that is there now."""


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `Arena.allocate(shape, dtype)` uses up."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class CountingAllocator:
    """Stands in for an arena to learn how large it must be: gives out meta tensors."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_bytes += padded_bytes(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


class BumpAllocator:
    """Finds places for tensors, one behind the other."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._used_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Where the next one begins. Raises AssertionError where the memory ends."""
        begin = self._used_bytes
        self._used_bytes += padded_bytes(shape, dtype)
        assert self._used_bytes <= self._num_bytes, "the arena was counted too small"
        return begin
