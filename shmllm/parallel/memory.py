"""The memory that the ranks of a group share: the words by which steps begin, and named arrays.

It is an unnamed file that grows, which the other ranks inherit from rank 0 as a descriptor: no
name is left behind, and the kernel frees it with the last process. Each array is a mapping of its
own, so its pages are taken when they are written first, on the memory node of who writes them.

    offset   word            written by      read by
    0        STEP            rank 0          all: the number of the step that is to run
    64       KIND            rank 0          all: what that step is, see `Kind`
    128      ENDED           rank 0          all: not 0 when the group has ended
    192      BEGUN           each rank       rank 0: the step that it began last, 64 bytes a rank
    4096     for each rank, PARKED and a doorbell
    16384    arrays, each on pages of its own

A rank stores STEP behind everything that a step reads, and each rank reads STEP before it reads
that, as `ipc.words` orders them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.errors import SegmentError
from shmllm.ipc.doorbell import Doorbell, initialise_doorbell, open_doorbell, remove_doorbell
from shmllm.ipc.layout import DOORBELL_BYTES, WORD_BYTES
from shmllm.ipc.wait import Waiter, WaitPolicy, wake_if_parked
from shmllm.ipc.words import PlainWord, Word
from shmllm.models.shard import Shard
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.group import Kind

STEP, KIND, ENDED, BEGUN = 0, 64, 128, 192
LINE_BYTES = 64
BELLS = 4096
BELL_BYTES = 2 * LINE_BYTES + DOORBELL_BYTES
HEADER_BYTES = 16384
MOST_RANKS = 64
PARK_S = 0.25
"""The longest sleep of a rank that waits for a step."""

Place = tuple[int, tuple[int, ...], str]
"""The offset, the shape and the dtype name of an array."""


class GroupMemory:
    """The memory of a group, in one of its processes; see `worker.cpu.group.CpuGroup`.

    Args:
        fd: the descriptor of the file; this object closes it.
        shard: the place of this process.

    Attributes:
        shard: as given.
        places: by the name of an array, its place. The other ranks get those of rank 0.
        step, ended: see `CpuGroup`.
        turn: held while the ranks do something, a step or a command: only one thing is under way.
    """

    def __init__(self, fd: int, shard: Shard) -> None:
        self.fd = fd
        self.shard = shard
        self.places: dict[str, Place] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        if shard.rank == 0:
            os.ftruncate(fd, HEADER_BYTES)
        self._header = memoryview(mmap.mmap(fd, HEADER_BYTES))
        self.step: LongArray = np.frombuffer(self._header, np.int64, 1, STEP)
        self.ended: LongArray = np.frombuffer(self._header, np.int64, 1, ENDED)
        self._step, self._kind, self._ended = (
            Word(self._header, offset) for offset in (STEP, KIND, ENDED)
        )
        self._begun = [Word(self._header, BEGUN + LINE_BYTES * rank) for rank in range(shard.size)]
        if shard.rank == 0:
            for rank in range(1, shard.size):
                initialise_doorbell(self._bell(rank), f"/shmllm-{os.getpid()}-rank-{rank}")
        ranks = range(1, shard.size) if shard.rank == 0 else [shard.rank]
        self._parked: dict[int, PlainWord] = {
            rank: Word(self._header, BELLS + BELL_BYTES * rank) for rank in ranks
        }
        self._bells: dict[int, Doorbell] = {rank: open_doorbell(self._bell(rank)) for rank in ranks}
        self.on_check: Callable[[], None] = _nothing
        self.turn = RLock()

    @classmethod
    def create(cls, size: int) -> GroupMemory:
        """Create the memory of a group of `size` ranks; this process is rank 0."""
        fd = os.memfd_create("shmllm-ranks", os.MFD_CLOEXEC)
        return cls(fd, Shard(0, size))

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        """Return an array of zeros that all ranks share by its name. Rank 0 makes it.

        Raises:
            SegmentError: this rank asks for another shape or dtype than rank 0.
        """
        if name not in self._arrays:
            self._arrays[name] = self._map(self._place(name, shape, dtype))
        return self._arrays[name]

    def floats(self, name: str, *shape: int) -> Tensor:
        """As `array`, a tensor of float32."""
        return torch.from_numpy(self.array(name, *shape, dtype="float32"))

    @contextmanager
    def playing(self, kind: Kind) -> Iterator[None]:
        with self.turn:
            self.begin(kind)
            yield
            self.check()

    def begin(self, kind: Kind) -> None:
        """Let the other ranks begin a step. Rank 0 has written what they read."""
        self._kind.store(kind)
        self._step.store(self._step.load() + 1)
        for rank, parked in self._parked.items():
            wake_if_parked(parked, self._bells[rank])

    def check(self) -> None:
        """Raise if the group has ended: what a step computed is undefined then."""
        if self._ended.load():
            self.on_check()

    def end(self) -> None:
        """Let all waiting ranks go on: the group has ended."""
        self._ended.store(1)

    @property
    def has_ended(self) -> bool:
        """Whether the group has ended."""
        return bool(self._ended.load())

    def waiter(self, policy: WaitPolicy) -> Waiter:
        """Return what waits for steps in this rank."""
        rank = self.shard.rank
        return Waiter(self._parked[rank], self._bells[rank], policy)

    def wait_for_step(self, waiter: Waiter, last: int) -> tuple[int, Kind | None]:
        """Wait for a step, at most PARK_S.

        Args:
            waiter: what `waiter` returned.
            last: the number of the last step that this rank has seen.

        Returns:
            The number of the step and its kind, or `last` and None.
        """
        load = self._step.load
        if not waiter.wait(lambda: load() != last, PARK_S):
            return last, None
        return load(), Kind(self._kind.load())

    def has_begun(self) -> None:
        """Record that this rank has begun the step."""
        self._begun[self.shard.rank].store(self._step.load())

    def late(self) -> list[int]:
        """Return the ranks that have not begun the current step."""
        step = self._step.load()
        return [rank for rank in range(1, self.shard.size) if self._begun[rank].load() != step]

    def close(self) -> None:
        """Remove what has names, and close the descriptor. Arrays stay mapped as long as used."""
        if self.shard.rank == 0:
            for rank in range(1, self.shard.size):
                remove_doorbell(self._bell(rank))
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _bell(self, rank: int) -> memoryview:
        begin = BELLS + BELL_BYTES * rank + LINE_BYTES
        return self._header[begin : begin + DOORBELL_BYTES]

    def _place(self, name: str, shape: tuple[int, ...], dtype: str) -> Place:
        if self.shard.rank:
            found = self.places.get(name)
            if found is None or found[1:] != (shape, dtype):
                raise SegmentError(f"rank 0 has {name!r} as {found}, this rank {shape} {dtype}")
            return found
        begin = os.fstat(self.fd).st_size
        os.ftruncate(self.fd, begin + _whole_pages(_num_bytes(shape, dtype)))
        self.places[name] = begin, shape, dtype
        return self.places[name]

    def _map(self, place: Place) -> npt.NDArray[Any]:
        begin, shape, dtype = place
        size = _whole_pages(_num_bytes(shape, dtype))
        mapping = mmap.mmap(self.fd, size, offset=begin)
        return np.frombuffer(mapping, dtype, prod(shape)).reshape(shape)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return max(prod(shape) * np.dtype(dtype).itemsize, WORD_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _nothing() -> None:
    pass
