"""The kernels in which the ranks of a group meet on a CPU.

This module owns where a program has sums over the ranks. It must not know processes:
`parallel.memory` shares memory between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shmllm.models.matrices import Matrix, addresses
from shmllm.worker.arrays import LongArray
from shmllm.worker.group import Group, Kind
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.group import AWAIT, LINE_BYTES, MEET, PUBLISH, SUM_PARTS, TAKE

LINE_WORDS = LINE_BYTES // 8


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
        width: the largest width of a row.
    """

    def __init__(
        self,
        program: KernelProgram,
        name: str,
        group: Group,
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

    def part(self, width: int) -> Tensor:
        """Return where this rank writes its part of the next sum, [max_rows, width]."""
        memory = self._parts[self._num_meetings % 2][self._group.shard.rank]
        return memory.view(-1)[: len(memory) * width].view(-1, width)

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
        return [num_rows, *shared, group.ended.ctypes.data, group.waits.ctypes.data]


@contextmanager
def played_by_all(group: Group, kind: Kind, meetings: Meetings) -> Iterator[None]:
    """Let the other ranks compute their parts of a program while the block computes this one's. An
    exception that has kept the block from that, such as an interrupt, ends the group: the others
    would wait for it.

    Args:
        group: the group.
        kind: by which the others know the program.
        meetings: those of the program.
    """
    with group.turn:
        try:
            group.begin(kind)
            yield
        except BaseException:
            if meetings.are_needed and not meetings.have_ended:
                group.end()
            raise
    group.check()


class Link:
    """Records in a program where a stage of a pipeline takes over from the one before it.

    Args:
        program: the program, of one of the pipeline's batches.
        name: the name of the batch.
        group: the group.
        step: (1,) int64, the number of the batch's step.
    """

    def __init__(self, program: KernelProgram, name: str, group: Group, step: LongArray) -> None:
        self._program = program
        self._group = group
        words = group.array(f"{name} stages", group.size, LINE_WORDS)
        step_and_words = step.ctypes.data, words.ctypes.data
        last = group.ended.ctypes.data, group.waits.ctypes.data
        self._meeting = [*step_and_words, group.rank, group.size, *last]

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
