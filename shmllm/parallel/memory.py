"""The memory that the ranks of a group share: the words by which steps begin, and named arrays.

It is an unnamed file that grows, which the other ranks inherit from rank 0 as a descriptor: no
name is left behind, and the kernel frees it with the last process. Each array is a mapping of its
own, so its pages are taken when they are written first, on the memory node of who writes them.

    offset   word            written by      read by
    0        STEP            rank 0          all: the number of the last step that may run
    128      ENDED           rank 0          all: not 0 when the group has ended
    4352     for each rank, PARKED, TAKEN and a doorbell; that rank writes both words, and TAKEN
             is the number of the last step whose kind it has read
    20480    KINDS           rank 0          all: what each of the last NUM_KINDS steps is
    24576    arrays, each on pages of its own

A rank stores STEP behind everything that a step reads, and each rank reads STEP before it reads
that, as `ipc.words` orders them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.errors import SegmentError
from shmllm.ipc.doorbell import Doorbell, initialise_doorbell, open_doorbell, remove_doorbell
from shmllm.ipc.layout import DOORBELL_BYTES, WORD_BYTES
from shmllm.ipc.wait import Waiter, WaitPolicy, wake_if_parked
from shmllm.ipc.words import PlainWord, Word, WordTable
from shmllm.models.config import ModelConfig
from shmllm.models.shard import WHOLE, Shard
from shmllm.models.sharding import shard_config, stage_config
from shmllm.worker.arrays import LongArray
from shmllm.worker.group import Kind

STEP, ENDED = 0, 128
LINE_BYTES = 64
BELLS = 4352
BELL_BYTES = LINE_BYTES + DOORBELL_BYTES
TAKEN = WORD_BYTES
"""The offset of the word behind PARKED."""
KINDS = 20480
NUM_KINDS = 512
"""The most steps that rank 0 may have begun and another rank not."""
HEADER_BYTES = 24576
MOST_RANKS = 64
LOOK_S = 0.0005
"""How often rank 0 looks whether a rank that is so far behind has begun a step."""
PARK_S = 0.25
"""The longest sleep of a rank that waits for a step."""

Place = tuple[int, tuple[int, ...], str]
"""The offset, the shape and the dtype name of an array."""


class GroupMemory:
    """The memory of a group, in one of its processes; see `worker.group.Group`.

    Args:
        fd: the descriptor of the file; this object closes it.
        rank: the number of this process.
        size: the number of processes.
        is_pipeline: whether they divide the layers, and not each layer.

    Attributes:
        places: by the name of an array, its place. The other ranks get those of rank 0.

    Its other attributes are those of `Group`.
    """

    def __init__(self, fd: int, rank: int, size: int, is_pipeline: bool) -> None:
        self.fd = fd
        self.rank, self.size = rank, size
        self.shard = WHOLE if is_pipeline else Shard(rank, size)
        self.num_stages = size if is_pipeline else 1
        self.places: dict[str, Place] = {}
        self._num_told = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        if rank == 0:
            os.ftruncate(fd, HEADER_BYTES)
        self._header = memoryview(mmap.mmap(fd, HEADER_BYTES))
        self.step: LongArray = np.frombuffer(self._header, np.int64, 1, STEP)
        self.ended: LongArray = np.frombuffer(self._header, np.int64, 1, ENDED)
        self._step, self._ended = (Word(self._header, offset) for offset in (STEP, ENDED))
        self._kinds = WordTable(self._header, KINDS, NUM_KINDS)
        if rank == 0:
            for other in range(1, size):
                initialise_doorbell(self._bell(other), f"/shmllm-{os.getpid()}-rank-{other}")
        self._last = 0
        ranks = [rank] if rank else range(1, size)
        self._parked: dict[int, PlainWord] = {
            each: Word(self._header, BELLS + BELL_BYTES * each) for each in ranks
        }
        self._taken: dict[int, PlainWord] = {
            each: Word(self._header, BELLS + BELL_BYTES * each + TAKEN) for each in ranks
        }
        self._all_have_taken = 0
        self._bells: dict[int, Doorbell] = {each: open_doorbell(self._bell(each)) for each in ranks}
        self.on_check: Callable[[], None] = _nothing

    @classmethod
    def create(cls, size: int, is_pipeline: bool = False) -> Self:
        """Create the memory of a group of `size` ranks; this process is rank 0."""
        fd = os.memfd_create("shmllm-ranks", os.MFD_CLOEXEC)
        return cls(fd, 0, size, is_pipeline)

    def divide(self, config: ModelConfig) -> ModelConfig:
        """See `Group.divide`."""
        if self.num_stages > 1:
            return stage_config(config, self.rank, self.size)
        return shard_config(config, self.shard)

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        """Return an array of zeros that all ranks share by its name. Rank 0 makes it.

        Raises:
            SegmentError: this rank asks for another shape or dtype than rank 0.
        """
        if name not in self._arrays:
            self._arrays[name] = self._map(self._place(name, shape, dtype))
        return self._arrays[name]

    def found(self, name: str) -> npt.NDArray[Any]:
        """Return an array that rank 0 has made.

        Raises:
            SegmentError: it has not made one of that name.
        """
        if name not in self.places:
            raise SegmentError(f"rank 0 has no {name!r}")
        _, shape, dtype = self.places[name]
        return self.array(name, *shape, dtype=dtype)

    def new_places(self) -> dict[str, Place]:
        """Return the places of the arrays that were made since the last call."""
        new = dict(list(self.places.items())[self._num_told :])
        self._num_told = len(self.places)
        return new

    def floats(self, name: str, *shape: int) -> Tensor:
        """As `array`, a tensor of float32."""
        return torch.from_numpy(self.array(name, *shape, dtype="float32"))

    def begin(self, kind: Kind, slot: int = 0) -> None:
        """See `Group.begin`."""
        number = self._step.load() + 1
        self._wait_for_place(number)
        self._kinds.store(number % NUM_KINDS, slot * len(Kind) + kind)
        self._step.store(number)
        for rank, parked in self._parked.items():
            wake_if_parked(parked, self._bells[rank])

    def _wait_for_place(self, number: int) -> None:
        """Wait until all ranks have read the kind of the step that is overwritten."""
        while number - self._all_have_taken > NUM_KINDS:
            self._all_have_taken = min(word.load() for word in self._taken.values())
            if number - self._all_have_taken > NUM_KINDS:
                self.check()
                time.sleep(LOOK_S)

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
        return Waiter(self._parked[self.rank], self._bells[self.rank], policy)

    def next_step(self, waiter: Waiter) -> tuple[Kind, int] | None:
        """Wait for the step behind the one that this rank computed last, at most PARK_S.

        Args:
            waiter: what `waiter` returned.

        Returns:
            What it is, and the batch; None: none has come.
        """
        number, load = self._last + 1, self._step.load
        if not waiter.wait(lambda: load() >= number, PARK_S):
            return None
        self._last = number
        slot, kind = divmod(self._kinds.load(number % NUM_KINDS) - 1, len(Kind))
        self._taken[self.rank].store(number)
        return Kind(kind + 1), slot

    def close(self) -> None:
        """Remove what has names, and close the descriptor. Arrays stay mapped as long as used."""
        if self.rank == 0:
            for other in range(1, self.size):
                remove_doorbell(self._bell(other))
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _bell(self, rank: int) -> memoryview:
        begin = BELLS + BELL_BYTES * rank + LINE_BYTES
        return self._header[begin : begin + DOORBELL_BYTES]

    def _place(self, name: str, shape: tuple[int, ...], dtype: str) -> Place:
        if self.rank:
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
