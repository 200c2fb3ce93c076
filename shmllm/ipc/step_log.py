"""The step log: a circular buffer in shared memory with one record for each recent step.

This module ensures that a reader never gets a half-written or overwritten record. It must not
know the meaning of the fields. The writer stores the count of all records after each record. It
never waits for a reader, so a reader may miss records; the positions tell it how many.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmllm.ipc import layout
from shmllm.ipc.stats import StepField
from shmllm.ipc.words import CountWord

_RECORD = struct.Struct(f"<{len(StepField)}Q")
_WORDS_PER_RECORD = layout.STEP_RECORD_BYTES // layout.WORD_BYTES
_DATA_BYTES = layout.NUM_STEP_RECORDS * layout.STEP_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps from the log.

    Attributes:
        fields: int64 array of shape (steps, fields), with one column for each StepField.
        next: the position after the last step, for the next call of `StepLogReader.read`.
        num_missed: the number of steps after `since` that were overwritten before this call.
    """

    fields: npt.NDArray[np.int64]
    next: int
    num_missed: int


class StepLogWriter:
    """Writes the step log; only the engine process creates one.

    Args:
        buffer: the bytes of the control segment.
    """

    __slots__ = ("_count", "_data", "_next")

    def __init__(self, buffer: memoryview) -> None:
        begin = layout.CONTROL_STEP_RECORDS_OFFSET
        self._data = buffer[begin : begin + _DATA_BYTES]
        self._count = CountWord(buffer, layout.CONTROL_STEP_COUNT_OFFSET)
        self._next = self._count.load()

    def add(self, values: Sequence[int]) -> None:
        """Log a step.

        Args:
            values: the values of all fields, in the order of StepField.
        """
        place = self._next % layout.NUM_STEP_RECORDS
        _RECORD.pack_into(self._data, place * layout.STEP_RECORD_BYTES, *values)
        self._next += 1
        # SYNC POINT: step logged. The count is stored after this record and before the next.
        self._count.store(self._next)

    def close(self) -> None:
        """Release the views of the segment; idempotent."""
        self._data.release()
        self._count.close()


class StepLogReader:
    """Reads the step log.

    Args:
        buffer: the bytes of the control segment.
    """

    __slots__ = ("_count", "_data")

    def __init__(self, buffer: memoryview) -> None:
        begin = layout.CONTROL_STEP_RECORDS_OFFSET
        self._data = buffer[begin : begin + _DATA_BYTES]
        self._count = CountWord(buffer, layout.CONTROL_STEP_COUNT_OFFSET)

    @property
    def count(self) -> int:
        """The number of steps logged so far."""
        return self._count.load()

    def read(self, since: int = 0) -> Steps:
        """The steps from position `since` on, except overwritten ones.

        Args:
            since: 0 for all steps, or `Steps.next` of an earlier call.
        """
        # SYNC POINT: step logged
        end = self._count.load()
        data = bytes(self._data)
        # SYNC POINT: step logged. A byte of a newer record in `data` means a newer count here. The
        # writer may be overwriting the oldest record, so that record is left out.
        first = max(since, self._count.load() + 1 - layout.NUM_STEP_RECORDS)
        records = np.frombuffer(data, "<i8").reshape(-1, _WORDS_PER_RECORD)[:, : len(StepField)]
        places = np.arange(first, max(end, first)) % layout.NUM_STEP_RECORDS
        return Steps(records[places], max(end, first), first - since)

    def close(self) -> None:
        """Release the views of the segment; idempotent."""
        self._data.release()
        self._count.close()
