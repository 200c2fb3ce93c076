"""A reader of the step log gets each step whole, or counts it as missed."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shmllm.ipc import layout, step_log, words
from shmllm.ipc.stats import StepField
from shmllm.ipc.step_log import StepLogReader, StepLogWriter

LAPS = layout.NUM_STEP_RECORDS


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(layout.CONTROL_END_OFFSET))


def record(number: int) -> list[int]:
    return [number * 100 + field for field in StepField]


def test_all_fields_of_a_step_are_found(memory: memoryview) -> None:
    writer, reader = StepLogWriter(memory), StepLogReader(memory)
    writer.add(record(3))
    steps = reader.read()
    assert steps.fields.tolist() == [record(3)]
    assert [steps.fields[:, field].tolist() for field in StepField] == [[v] for v in record(3)]
    assert (steps.next, steps.num_missed) == (1, 0)


def test_a_read_continues_where_the_last_one_ended(memory: memoryview) -> None:
    writer, reader = StepLogWriter(memory), StepLogReader(memory)
    assert len(reader.read().fields) == 0
    since = 0
    for first in (0, 3, 3, 8):
        while writer._next < first:
            writer.add(record(writer._next))
        steps = reader.read(since)
        assert steps.fields.tolist() == [record(number) for number in range(since, first)]
        since = steps.next
    assert reader.count == 8


def test_overwritten_steps_count_as_missed(memory: memoryview) -> None:
    writer, reader = StepLogWriter(memory), StepLogReader(memory)
    for number in range(2 * LAPS + 5):
        writer.add(record(number))
    steps = reader.read(since=LAPS)
    # The writer may already be overwriting the oldest record, so that one counts as missed too.
    assert steps.num_missed == 6
    assert steps.fields.tolist() == [record(n) for n in range(LAPS + 6, 2 * LAPS + 5)]


def test_a_reader_beside_a_writer_never_sees_half_a_record(memory: memoryview) -> None:
    writer, reader = StepLogWriter(memory), StepLogReader(memory)
    done = threading.Event()

    def write() -> None:
        for number in range(40_000):
            writer.add([number] * len(StepField))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = missed = since = 0
    while not done.is_set() or since < reader.count:
        steps = reader.read(since)
        seen, missed, since = seen + len(steps.fields), missed + steps.num_missed, steps.next
        assert (steps.fields == steps.fields[:, :1]).all()
    thread.join()
    assert seen + missed == 40_000


def test_a_second_writer_continues_after_the_first(memory: memoryview) -> None:
    StepLogWriter(memory).add(record(0))
    StepLogWriter(memory).add(record(1))
    assert StepLogReader(memory).read().fields.tolist() == [record(0), record(1)]


class TestOnAMachineThatReorders:
    """The order of fences, copies and accesses to the count. tools/model/step_log.pml refutes the
    log without any one of these fences."""

    @pytest.fixture
    def events(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        events: list[str] = []

        def reported(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                events.append(event)
                return function(*args)

            return call

        class CountWord(words.TwiceFencedWord):
            def __init__(self, view: memoryview, offset: int) -> None:
                super().__init__(view, offset)
                word = self._view

                class View:
                    __getitem__ = staticmethod(reported("load", word.__getitem__))
                    __setitem__ = staticmethod(reported("store", word.__setitem__))

                self._view = View()  # type: ignore[assignment]

        fields = struct.Struct(f"<{len(StepField)}Q")
        record = SimpleNamespace(pack_into=reported("record", fields.pack_into))
        monkeypatch.setattr(step_log, "CountWord", CountWord)
        monkeypatch.setattr(step_log, "_RECORD", record)
        monkeypatch.setattr(step_log, "bytes", reported("copy", bytes), raising=False)
        monkeypatch.setattr(words, "fence", lambda: events.append("fence"))
        return events

    def test_the_count_is_stored_between_two_records(
        self, memory: memoryview, events: list[str]
    ) -> None:
        writer = StepLogWriter(memory)
        events.clear()
        for number in range(2):
            writer.add(record(number))
        assert " ".join(events).startswith("record fence store fence record fence store")

    def test_the_copy_lies_between_two_loads_of_the_count(
        self, memory: memoryview, events: list[str]
    ) -> None:
        StepLogReader(memory).read()
        assert "load fence copy fence load" in " ".join(events)
