"""The latest steps of an engine, one record each, for whoever follows them.

Owns how records are written so that a reader never takes a half-written or overwritten one
for whole; must not know what an engine does. The log is a circle of records. The count of
all records so far is stored behind each of them and never waits for a reader, who may miss
some: it can tell by the positions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmllm.ipc import layout
from shmllm.ipc.stats import StepField
from shmllm.ipc.words import Word

_RECORD = struct.Struct(f"<{len(StepField)}Q")
_WORDS_PER_RECORD = layout.STEP_RECORD_BYTES // layout.WORD_BYTES
_DATA_BYTES = layout.NUM_STEP_RECORDS * layout.STEP_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps that were logged.

    Attributes:
        fields: (steps, fields) int64, a column for each StepField.
        next: where the next look begins.
        num_missed: steps before `fields` that were overwritten before this look.
    """

    fields: npt.NDArray[np.int64]
    next: int
    num_missed: int

    def column(self, field: StepField) -> npt.NDArray[np.int64]:
        """One number of each step."""
        return self.fields[:, field]


class StepLogWriter:
    """The engine's end.

    Args:
        buffer: of the control segment.
    """

    __slots__ = ("_count", "_data", "_next")

    def __init__(self, buffer: memoryview) -> None:
        begin = layout.CONTROL_STEP_RECORDS_OFFSET
        self._data = buffer[begin : begin + _DATA_BYTES]
        self._count = Word(buffer, layout.CONTROL_STEP_COUNT_OFFSET)
        self._next = self._count.load()

    def add(self, values: Sequence[int]) -> None:
        """Log a step.

        Args:
            values: in the order of StepField.
        """
        place = self._next % layout.NUM_STEP_RECORDS
        _RECORD.pack_into(self._data, place * layout.STEP_RECORD_BYTES, *values)
        self._next += 1
        # SYNC POINT: step logged. After the record.
        self._count.store(self._next)

    def close(self) -> None:
        """Let go of the segment; idempotent."""
        self._data.release()
        self._count.close()


class StepLogReader:
    """
    Args:
        buffer: of the control segment.
    """

    __slots__ = ("_count", "_data")

    def __init__(self, buffer: memoryview) -> None:
        begin = layout.CONTROL_STEP_RECORDS_OFFSET
        self._data = buffer[begin : begin + _DATA_BYTES]
        self._count = Word(buffer, layout.CONTROL_STEP_COUNT_OFFSET)

    @property
    def count(self) -> int:
        """Steps that were logged so far."""
        return self._count.load()

    def read(self, since: int = 0) -> Steps:
        """Steps from position `since` on that are still there.

        Args:
            since: 0 for all, or `next` of an earlier look.
        """
        # SYNC POINT: step logged
        end = self._count.load()
        data = bytes(self._data)
        # The record behind the latest may be half overwritten by the next one.
        first = max(since, self._count.load() + 1 - layout.NUM_STEP_RECORDS)
        records = np.frombuffer(data, "<i8").reshape(-1, _WORDS_PER_RECORD)[:, : len(StepField)]
        places = np.arange(first, max(end, first)) % layout.NUM_STEP_RECORDS
        return Steps(records[places], max(end, first), first - since)

    def close(self) -> None:
        """Let go of the segment; idempotent."""
        self._data.release()
        self._count.close()
