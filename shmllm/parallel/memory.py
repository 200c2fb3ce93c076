"""The memory that the ranks of a group share: the words by which steps begin, and named arrays.

It is an unnamed file that grows, which the other ranks inherit from rank 0 as a descriptor: no
name is left behind, and the kernel frees it with the last process. Each array is a mapping of its
own, so its pages are taken when they are written first, on the memory node of who writes them.

    offset   word            written by      read by
    0        STEP            rank 0          all: the number of the last step that may run
    128      ENDED           any rank        all: 1 when the group has ended. Rank 0 stores it when
                                             a rank ends; another rank when it cannot make its KV
                                             cache or program, or when the engine ends
    192      LEFT            each rank       rank 0: the step that it left last, 64 bytes a rank
    8192     for each rank, PARKED and a doorbell
    20480    KINDS           rank 0          all: what each of the last NUM_KINDS steps is
    24576    LABELS          rank 0          all: see `Group.label`, of each of them
    28672    arrays, each on pages of its own

Rank 0 stores STEP behind everything that a step reads, and each rank reads STEP before it reads
that, as `ipc.words` orders them. docs/parallel.md has the protocol.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from math import prod
from threading import RLock
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.errors import RankDeadError, SegmentError
from shmllm.ipc.doorbell import Doorbell, initialise_doorbell, open_doorbell, remove_doorbell
from shmllm.ipc.layout import DOORBELL_BYTES, WORD_BYTES
from shmllm.ipc.wait import Waiter, WaitPolicy, wake_if_parked
from shmllm.ipc.words import PlainWord, Word, WordTable
from shmllm.models.config import ModelConfig
from shmllm.models.shard import WHOLE, Shard
from shmllm.models.sharding import shard_config, stage_config
from shmllm.worker.arena import resident_bytes_of
from shmllm.worker.arrays import LongArray
from shmllm.worker.group import Kind

STEP, ENDED, LEFT = 0, 128, 192
LINE_BYTES = 64
BELLS = 8192
BELL_BYTES = LINE_BYTES + DOORBELL_BYTES
KINDS = 20480
NUM_KINDS = 512
"""The most steps that rank 0 may have begun and another rank not."""
LABELS = 24576
HEADER_BYTES = 28672
LOOK_S = 0.0005
"""How often rank 0 looks whether a rank that is so far behind has left a step."""
POLLS = 8000
"""How often a rank that has `look` yields its core before it sleeps: about 2 ms, longer than rank 0
needs between two steps."""
PARK_S = 0.25
"""The longest sleep of a rank that waits for a step."""
SLEEP = WaitPolicy(0, 0, PARK_S, PARK_S)
LOOK_AND_SLEEP = WaitPolicy(5_000, 2_000_000, PARK_S, PARK_S)

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
        look: waits for a step for a while without Python's lock; see
            `shmllm_kernels.cpu.group.AwaitMore`. None: this rank looks for steps in Python.
        describe_end: returns why the group has ended, for the message of the error.

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
        self._mappings_of_floats: list[mmap.mmap] = []
        if rank == 0:
            os.ftruncate(fd, _whole_pages(HEADER_BYTES))
        self._header = memoryview(mmap.mmap(fd, HEADER_BYTES))
        self.step: LongArray = np.frombuffer(self._header, np.int64, 1, STEP)
        self.ended: LongArray = np.frombuffer(self._header, np.int64, 1, ENDED)
        self._step, self._ended = (Word(self._header, offset) for offset in (STEP, ENDED))
        self._kinds = WordTable(self._header, KINDS, NUM_KINDS)
        self._labels = WordTable(self._header, LABELS, NUM_KINDS)
        self._left = [Word(self._header, LEFT + LINE_BYTES * each) for each in range(size)]
        if rank == 0:
            for other in range(1, size):
                initialise_doorbell(self._bell(other), f"/shmllm-{os.getpid()}-rank-{other}")
        self._last = self.label = 0
        self.waits: LongArray = np.zeros(2, np.int64)
        self.look: Callable[[int, int], int] | None = None
        ranks = [rank] if rank else range(1, size)
        self._parked: dict[int, PlainWord] = {
            each: Word(self._header, BELLS + BELL_BYTES * each) for each in ranks
        }
        self._all_have_left = 0
        self._bells: dict[int, Doorbell] = {each: open_doorbell(self._bell(each)) for each in ranks}
        self.describe_end: Callable[[], str] = lambda: "the group has ended"
        self.turn = RLock()

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
        """See `SharedArrays.floats`."""
        return torch.from_numpy(self.array(name, *shape, dtype="float32"))

    @property
    def workspace_bytes(self) -> int:
        """The memory that all `floats` take now, in bytes."""
        return sum(resident_bytes_of(each) for each in self._mappings_of_floats)

    def drop_workspace(self) -> None:
        """Give the memory of all `floats` back, in all ranks, which have left the last step."""
        for mapping in self._mappings_of_floats:
            mapping.madvise(mmap.MADV_REMOVE)

    def begin(self, kind: Kind, slot: int = 0) -> None:
        """See `Group.begin`."""
        number = self._step.load() + 1
        self._wait_for_place(number)
        self._kinds.store(number % NUM_KINDS, slot * len(Kind) + kind)
        self._labels.store(number % NUM_KINDS, self.label)
        # SYNC POINT: step begun. Without the fence in this store, a rank could see the new step and
        # older inputs.
        self._step.store(number)
        for rank, parked in self._parked.items():
            wake_if_parked(parked, self._bells[rank])

    def settle(self, step: int | None = None) -> None:
        """See `Group.settle`."""
        step = self._step.load() if step is None else step
        for left in self._left[1:]:
            # SYNC POINT: step left. Without this wait, a thread of that rank that comes late could
            # count the pieces of a kernel by the inputs of the next step.
            while left.load() < step and not self._ended.load():
                os.sched_yield()
        self.check()

    def _wait_for_place(self, number: int) -> None:
        """Wait until all ranks have left the step whose kind is overwritten. Raises as `check`."""
        while number - self._all_have_left > NUM_KINDS:
            self._all_have_left = min(word.load() for word in self._left[1:])
            if number - self._all_have_left > NUM_KINDS:
                self.check()
                time.sleep(LOOK_S)

    def check(self) -> None:
        """See `Group.check`.

        Raises:
            RankDeadError: the group has ended.
        """
        if self._ended.load():
            raise RankDeadError(self.describe_end())

    def end(self) -> None:
        """Let all waiting ranks go on: the group has ended."""
        self._ended.store(1)
        for bell in self._bells.values():
            bell.post()

    @property
    def has_ended(self) -> bool:
        """Whether the group has ended."""
        return bool(self._ended.load())

    def waiter(self) -> Waiter:
        """Return what waits for steps in this rank."""
        policy = LOOK_AND_SLEEP if self.look is None else SLEEP
        return Waiter(self._parked[self.rank], self._bells[self.rank], policy)

    def next_step(self, waiter: Waiter) -> tuple[Kind, int] | None:
        """Wait for the step behind the one that this rank computed last, at most PARK_S.

        Args:
            waiter: what `waiter` returned.

        Returns:
            What it is, and the batch; None: none has come.
        """
        number, load = self._last + 1, self._step.load
        # SYNC POINT: step begun. The fence in this load is in front of all loads of the inputs.
        found = load() if self.look is None else self.look(self._last, POLLS)
        if found < number and not waiter.wait(lambda: load() >= number, PARK_S):
            return None
        self._last = number
        slot, kind = divmod(self._kinds.load(number % NUM_KINDS) - 1, len(Kind))
        return Kind(kind + 1), slot

    def label_of_step(self) -> int:
        """Return the label of the step that `next_step` returned last, which this rank has not
        left."""
        return self._labels.load(self._last % NUM_KINDS)

    def has_left(self) -> None:
        """Record that all threads of this rank have left the step that it computed."""
        # SYNC POINT: step left
        self._left[self.rank].store(self._last)

    def close(self) -> None:
        """Remove what has names, and close the descriptor. Arrays stay mapped as long as used.
        Idempotent."""
        if self.fd < 0:
            return
        if self.rank == 0:
            for other in range(1, self.size):
                remove_doorbell(self._bell(other))
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
        if dtype == "float32":
            self._mappings_of_floats.append(mapping)
        return np.frombuffer(mapping, dtype, prod(shape)).reshape(shape)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return max(prod(shape) * np.dtype(dtype).itemsize, WORD_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
