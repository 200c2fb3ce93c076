"""Memory through which rank 0 passes tensors to the other ranks, for as long as a call lasts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shmllm.errors import ShmLLMError
from shmllm.worker.arena import padded_bytes

BATCH_BYTES = 2**26


class StagedTensor(NamedTuple):
    """A tensor in the memory.

    name: its name.
    dtype: the name of its dtype.
    shape: its shape.
    offset: of its first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StagingWriter:
    """Creates the memory, in rank 0. It takes none until tensors are written.

    Args:
        settle: waits until no rank reads the memory, or raises ShmLLMError when they have ended.

    Attributes:
        fd: the descriptor of the memory, an unnamed file.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self.fd = os.memfd_create("shmllm-staging", os.MFD_CLOEXEC)
        self._settle = settle

    def batches(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Generator[list[StagedTensor], None, None]:
        """Write tensors, some at a time; those of a batch stay until the next one is asked for. The
        memory is freed at the end of the generator, which the caller has to close."""
        batch: list[tuple[str, Tensor]] = []
        size = 0
        try:
            for name, tensor in tensors:
                if batch and size + _padded(tensor) > BATCH_BYTES:
                    yield self._write(batch)
                    batch, size = [], 0
                batch.append((name, tensor))
                size += _padded(tensor)
            if batch:
                yield self._write(batch)
        finally:
            # Without this wait, a rank whose command was interrupted would read a file that ends.
            with suppress(ShmLLMError):
                self._settle()
            os.ftruncate(self.fd, 0)

    def _write(self, batch: Sequence[tuple[str, Tensor]]) -> list[StagedTensor]:
        total = sum(_padded(tensor) for _, tensor in batch)
        os.ftruncate(self.fd, max(total, os.fstat(self.fd).st_size))
        staged, offset, memory = [], 0, _mapped(self.fd)
        for name, tensor in batch:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found = StagedTensor(name, dtype, tuple(tensor.shape), offset)
            if tensor.numel():
                _tensor_at(memory, found).copy_(tensor)
            staged.append(found)
            offset += _padded(tensor)
        return staged

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StagingReader:
    """Reads the memory, in another rank.

    Args:
        fd: the descriptor of the memory.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, staged: Sequence[StagedTensor]) -> list[tuple[str, Tensor]]:
        """Return the tensors of a batch, as views of the memory."""
        memory = _mapped(self._fd)
        return [(each.name, _tensor_at(memory, each)) for each in staged]


def _mapped(fd: int) -> Tensor:
    """Return the whole memory, which is mapped as long as a tensor refers to it."""
    size = os.fstat(fd).st_size
    return torch.frombuffer(mmap.mmap(fd, max(size, 1)), dtype=torch.uint8)


def _padded(tensor: Tensor) -> int:
    return padded_bytes(tensor.shape, tensor.dtype)


def _tensor_at(memory: Tensor, staged: StagedTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, staged.dtype)
    size = prod(staged.shape) * dtype.itemsize
    return memory[staged.offset : staged.offset + size].view(dtype).view(staged.shape)
