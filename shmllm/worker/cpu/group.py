"""What the ranks of a tensor parallel group share on a CPU, and the kernels in which they meet.

This module owns the interface of a group's memory, and where a program has sums over the ranks. It
must not know processes: `parallel.memory` shares memory between them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.matrices import Matrix, addresses
from shmllm.models.shard import WHOLE, Shard
from shmllm.worker.arrays import LongArray
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.group import AWAIT, LINE_BYTES, MEET, PUBLISH, SUM_PARTS, TAKE

LINE_WORDS = LINE_BYTES // 8


class Kind(IntEnum):
    """What the ranks do in a step.

    STEP: a step of the model. SCORING: logits of some hidden states. COMMAND: something else, which
    each is told by itself.
    """

    STEP = 1
    SCORING = 2
    COMMAND = 3


class SharedArrays(Protocol):
    """Memory that all ranks of a group find by names."""

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        """Return an array of zeros that all ranks share by its name."""

    def floats(self, name: str, *shape: int) -> Tensor:
        """As `array`, a tensor of float32."""

    def settle(self) -> None:
        """Wait until the other ranks have left the step that read these arrays last: before that,
        this process must not write them. Raises as `CpuGroup.check`."""


class CpuGroup(SharedArrays, Protocol):
    """The memory of a group.

    Attributes:
        rank: the number of this process in it.
        size: the number of processes.
        shard: its place if the ranks divide each layer.
        num_stages: into how many stages the layers are divided.
        step: (1,) int64, the number of the step.
        ended: (1,) int64, not 0 when the group has ended, because one of its processes has.
        turn: held while the ranks of a tensor parallel group do something, a step or a command:
            kernels read the number of the step, so no other may begin.
    """

    rank: int
    size: int
    shard: Shard
    num_stages: int
    step: LongArray
    ended: LongArray

    @property
    def turn(self) -> AbstractContextManager[object]: ...

    def divide(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of this process's part of a model.

        Raises:
            EngineStartError: the model cannot be divided so.
        """

    def settle(self, step: int | None = None) -> None:
        """As `SharedArrays.settle`: wait until the other ranks have left a step, or all steps."""

    def begin(self, kind: Kind, slot: int = 0) -> None:
        """Let the other ranks begin a step; this process has written what they read.

        Args:
            kind: what they do.
            slot: which of a pipeline's batches it is.
        """

    def check(self) -> None:
        """Raise if the group has ended: what the step has computed is undefined then."""

    def end(self) -> None:
        """End the group: this process cannot compute its part of a step that has begun."""


class Alone:
    """The memory of a process that is no part of a group."""

    rank, size, num_stages = 0, 1, 1

    def __init__(self) -> None:
        self.shard = WHOLE
        self.step: LongArray = np.zeros(1, np.int64)
        self.ended: LongArray = np.zeros(1, np.int64)
        self.turn: AbstractContextManager[object] = nullcontext()

    def divide(self, config: ModelConfig) -> ModelConfig:
        return config

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        return np.zeros(shape, dtype)

    def floats(self, name: str, *shape: int) -> Tensor:
        return torch.zeros(shape)

    def settle(self, step: int | None = None) -> None:
        pass

    def end(self) -> None:
        pass

    def begin(self, kind: Kind, slot: int = 0) -> None:
        pass

    def check(self) -> None:
        pass


class Meetings:
    """Records in a program where the ranks of a group meet.

    A rank writes its part of a sum into memory that all share. There is memory for two sums, used
    in turn: when a rank writes its part of the next sum but one, all have arrived at the next one,
    so none reads this one any more.

    Args:
        program: the program.
        name: its name among the programs of a group.
        group: the group.
        partial: the addresses of the matrices whose products are parts of sums.
        max_rows: the largest number of rows of a sum.
        width: the width of a row.
    """

    def __init__(
        self,
        program: KernelProgram,
        name: str,
        group: CpuGroup,
        partial: frozenset[int] = frozenset(),
        max_rows: int = 0,
        width: int = 0,
    ) -> None:
        self._program = program
        self._name = name
        self._group = group
        self._partial = partial
        self._num_meetings = 0
        self._parts: list[Tensor] = []
        shard = group.shard
        self.are_needed = shard.size > 1
        self.has_rest = shard.rank == 0
        if partial:
            shape = shard.size, max_rows, width
            self._parts = [group.floats(f"parts {number}", *shape) for number in range(2)]

    def is_partial(self, weight: Matrix) -> bool:
        """Return whether the products of a matrix are parts of sums."""
        return bool(self._partial) and addresses(weight).start in self._partial

    def part(self) -> Tensor:
        """Return where this rank writes its part of the next sum, [max_rows, width]."""
        return self._parts[self._num_meetings % 2][self._group.shard.rank]

    def sum_parts(self, num_rows: int, out: Tensor) -> Tensor:
        """Record ``out = sum over the ranks of what they wrote to part()``; return ``out``.

        Args:
            num_rows: the address of an int64, the number of rows.
            out: [max_rows, width] float32.
        """
        parts = self._parts[self._num_meetings % 2]
        self._record_sum(num_rows, parts, out)
        return out

    def copy(self, num_rows: int, source: Tensor, out: Tensor) -> Tensor:
        """Record ``out = source`` after all ranks have written to it; return ``out``.

        Args:
            num_rows: the address of an int64, the number of rows.
            source: [max_rows, width] float32, shared.
            out: likewise, but not shared.
        """
        self._record_sum(num_rows, source[None], out)
        return out

    def gather(self) -> None:
        """Record that rank 0 waits for what the others have written. A program ends so."""
        kernel = MEET if self.has_rest else PUBLISH
        self._program.record(kernel, self._meeting(0), label="gather")

    @property
    def have_ended(self) -> bool:
        """Whether this process has arrived at the last meeting of the step."""
        group = self._group
        words = group.array(self._name_of(self._num_meetings - 1), group.shard.size, LINE_WORDS)
        return bool(words[group.shard.rank, 0] == group.step[0])

    def _name_of(self, number: int) -> str:
        return f"{self._name} meeting {number}"

    def _record_sum(self, num_rows: int, parts: Tensor, out: Tensor) -> None:
        stride = parts.element_size() * parts.stride(0)
        rows = [parts.data_ptr(), stride, len(parts), out.data_ptr(), out.shape[1]]
        self._program.record(SUM_PARTS, [*self._meeting(num_rows), *rows], label="sum_parts")

    def _meeting(self, num_rows: int) -> list[int]:
        """Return the operands of the next meeting."""
        group, size = self._group, self._group.shard.size
        words = group.array(self._name_of(self._num_meetings), size, LINE_WORDS)
        self._num_meetings += 1
        shared = [group.step.ctypes.data, words.ctypes.data, group.shard.rank, size]
        return [num_rows, *shared, group.ended.ctypes.data]


class Link:
    """Records in a program where a stage of a pipeline takes over from the one before it.

    Args:
        program: the program, of one of the pipeline's batches.
        name: the name of the batch.
        group: the group.
        step: (1,) int64, the number of the batch's step.
    """

    def __init__(self, program: KernelProgram, name: str, group: CpuGroup, step: LongArray) -> None:
        self._program = program
        self._group = group
        words = group.array(f"{name} stages", group.size, LINE_WORDS)
        addresses = [each.ctypes.data for each in (step, words)]
        self._meeting = [*addresses, group.rank, group.size, group.ended.ctypes.data]

    def take(self, num_rows: int, source: Tensor, out: Tensor) -> Tensor:
        """Record ``out = source`` after the stage before this one has written it; return ``out``.

        Args:
            num_rows: the address of an int64, the number of rows.
            source: [max_rows, width] float32, shared.
            out: likewise.
        """
        rows = [self._group.rank - 1, source.data_ptr(), out.data_ptr(), out.shape[1]]
        self._program.record(TAKE, [num_rows, *self._meeting, *rows], label="take")
        return out

    def publish(self) -> None:
        """Record that this stage has written its result."""
        self._program.record(PUBLISH, [0, *self._meeting], label="publish")

    def wait_for_last(self) -> None:
        """Record that this process waits for the last stage."""
        last = self._group.size - 1
        self._program.record(AWAIT, [0, *self._meeting, last], label="await")
