"""The error log counts each distinct error once, and its reader never gets half an entry."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_S, join_all

from shmllm.ipc import error_log, layout
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.error_log import (
    ErrorLogWriter,
    LoggedError,
    cut_off,
    read_errors,
    reason_for,
    refused,
)
from shmllm.ipc.segment import Segment
from shmllm.ipc.words import PlainWord


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(layout.CONTROL_END_OFFSET))


@pytest.fixture
def writer(memory: memoryview) -> ErrorLogWriter:
    return ErrorLogWriter(memory)


def texts(memory: memoryview) -> list[str]:
    return [error.text for error in read_errors(memory)]


def word_name(number: int) -> str:
    """A word for a number: texts that differ in it are different errors."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_a_new_log_is_empty_and_is_read_through_read_only_memory(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    shown = memory.toreadonly()
    assert read_errors(shown) == []
    writer.record("it broke")
    assert [(error.text, error.count) for error in read_errors(shown)] == [("it broke", 1)]


def test_the_same_error_is_counted_and_keeps_its_first_time(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    before_ns = time.time_ns()
    for _ in range(3):
        writer.record("it broke")
    (error,) = read_errors(memory)
    assert (error.text, error.count) == ("it broke", 3)
    assert before_ns <= error.first_ns < error.last_ns <= time.time_ns()


def test_errors_that_differ_in_numbers_are_one_which_shows_the_last(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    for number in (7, 99, 12345):
        writer.record(f"front end {number} stored {number:#x}f")
    (error,) = read_errors(memory)
    assert (error.text, error.count) == ("front end 12345 stored 0x3039f", 3)


def test_numbers_of_other_lengths_make_no_other_error_of_a_text_that_is_cut(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    for number in (1, 10**9):
        writer.record(f"{number} " + "x" * 600)
    (error,) = read_errors(memory)
    assert error.count == 2


def test_the_latest_error_comes_last(memory: memoryview, writer: ErrorLogWriter) -> None:
    for text in ("one", "two", "three", "one"):
        writer.record(text)
    assert texts(memory) == ["two", "three", "one"]


def test_a_full_log_replaces_the_error_that_has_not_occurred_for_the_longest_time(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    names = [word_name(number) for number in range(layout.NUM_ERRORS)]
    for name in (*names, names[0], "new"):
        writer.record(name)
    assert texts(memory) == [*names[2:], names[0], "new"]
    writer.record(names[1])
    assert texts(memory) == [*names[3:], names[0], "new", names[1]]
    assert {error.count for error in read_errors(memory) if error.text != names[0]} == {1}


def test_many_errors_of_one_place_hide_no_error_of_another(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    writer.record("of the engine")
    for place in (3, 5):
        writer.record("of a place", place)
    for number in range(3 * layout.NUM_ERRORS):
        writer.record(word_name(number), 5)
    assert texts(memory)[:2] == ["of the engine", "of a place"]
    assert len(texts(memory)) == layout.NUM_ERRORS
    assert texts(memory)[-1] == word_name(3 * layout.NUM_ERRORS - 1)


def test_times_of_two_errors_differ_also_when_the_clock_stands_still(
    memory: memoryview, writer: ErrorLogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    for text in ("one", "two", "one"):
        writer.record(text)
    assert [(e.text, e.first_ns, e.last_ns) for e in read_errors(memory)] == [
        ("two", 1001, 1001),
        ("one", 1000, 1002),
    ]


@pytest.mark.parametrize("head", ["", "x", "xx", "xxx"])
def test_a_long_text_loses_its_end_between_two_characters(
    memory: memoryview, writer: ErrorLogWriter, head: str
) -> None:
    writer.record(head + "\N{GRINNING FACE}" * 200)
    (text,) = texts(memory)
    assert text.endswith("\N{GRINNING FACE}...")
    assert "\ufffd" not in text
    assert layout.ERROR_TEXT_BYTES - 4 < len(text.encode()) <= layout.ERROR_TEXT_BYTES


def test_only_the_beginning_of_a_huge_text_is_looked_at(
    memory: memoryview, writer: ErrorLogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    one_line = error_log._one_line

    def observed(text: str) -> str:
        looked_at.append(len(text))
        return one_line(text)

    monkeypatch.setattr(error_log, "_one_line", observed)
    for number in (1, 2):
        writer.record(f"{number} " + "7, " * 10**6)
    assert max(looked_at) < 10_000
    (error,) = read_errors(memory)
    assert error.count == 2
    assert error.text.endswith("...")


def test_a_text_becomes_one_line_that_changes_no_terminal(
    memory: memoryview, writer: ErrorLogWriter
) -> None:
    writer.record("bad\x1b[2J\n  text \udcff é")
    assert texts(memory) == ["bad?[2J text ? é"]


def test_a_damaged_size_is_limited(memory: memoryview, writer: ErrorLogWriter) -> None:
    writer.record("it broke")
    PlainWord(memory, layout.CONTROL_ERRORS_OFFSET + layout.ERROR_TEXT_SIZE_OFFSET).store(2**60)
    assert [len(text) for text in texts(memory)] == [layout.ERROR_TEXT_BYTES]


def test_page_and_view_of_a_control_segment(control: Segment) -> None:
    page, view = ControlPage(control), ControlView(control)
    page.errors.record("it broke")
    assert [error.text for error in view.errors()] == ["it broke"]
    view.close()
    page.close()


def test_the_reason_of_a_front_end_is_the_latest_that_concerns_it() -> None:
    entries = [
        LoggedError(cut_off(5, 1, "an old one"), 1, 0, 10),
        LoggedError(cut_off(5, 1, "it was slow"), 1, 0, 20),
        LoggedError(refused(2, "no segment"), 1, 0, 21),
        LoggedError(cut_off(5, 2, "another place"), 1, 0, 22),
        LoggedError(cut_off(6, 1, "another process"), 1, 0, 23),
    ]
    assert reason_for(entries, 5, 1, since_ns=0) == "it was slow"
    assert reason_for(entries, 5, 1, since_ns=21) == ""
    assert reason_for(entries, 4, 2, since_ns=0) == "no segment"
    assert reason_for([], 5, 1, since_ns=0) == ""


class Hooked(PlainWord):
    """A word that calls a function before each load, and before and after each store."""

    on_load: Callable[[], None]
    on_store: Callable[[], None]

    def load(self) -> int:
        Hooked.on_load()
        return super().load()

    def store(self, value: int) -> None:
        Hooked.on_store()
        super().store(value)
        Hooked.on_store()


NEVER = 99


class Interleaving:
    """A writer in a thread that does some of its steps before one load of the reader, and the
    others before a later load, or never.

    Args:
        writer: the writer.
        first_load: the number of the load before which it begins, counted from 0.
        num_steps: the number of steps that it does then. A step is a store, or what is between
            two stores.
        second_load: the number of the load before which it goes on; NEVER: it was killed.
    """

    def __init__(
        self, writer: ErrorLogWriter, first_load: int, num_steps: int, second_load: int
    ) -> None:
        self._may_store = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._num_loads = self._num_steps = 0
        self._stop_at = num_steps
        self._at_load = {first_load: self._begin, second_load: self.finish}
        self._thread = threading.Thread(target=lambda: (writer.record(NEW), self._waits.release()))
        Hooked.on_load = self._load
        Hooked.on_store = self._store

    def _load(self) -> None:
        action = self._at_load.pop(self._num_loads, None)
        self._num_loads += 1
        if action is not None:
            action()

    def _store(self) -> None:
        if self._num_steps == self._stop_at:
            self._waits.release()
            assert self._may_store.acquire(timeout=PATIENCE_S)
        self._num_steps += 1

    def _begin(self) -> None:
        self._thread.start()
        assert self._waits.acquire(timeout=PATIENCE_S)

    def finish(self) -> None:
        self._may_store.release()
        if self._thread.ident is not None:
            join_all([self._thread])


OLD, NEW = "the old error", "a new one, whose text is longer"
WRITER_STEPS = 10
TIME_IS_STORED = 3
READER_LOADS = 6


@pytest.fixture
def one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log with one entry, which each new error replaces, and with words that call hooks."""
    monkeypatch.setattr(layout, "NUM_ERRORS", 1)
    monkeypatch.setattr(error_log, "Word", Hooked)
    monkeypatch.setattr(error_log, "READ_ATTEMPTS", 3)


def nothing() -> None:
    pass


@pytest.mark.parametrize("num_steps", range(WRITER_STEPS + 1))
def test_a_reader_gets_a_whole_entry_wherever_the_writer_stands(
    one_entry: None, num_steps: int
) -> None:
    """The old and the new entry have the same count."""
    seen = set()
    for first, second in itertools.combinations([*range(READER_LOADS), NEVER], 2):
        memory = memoryview(bytearray(layout.CONTROL_END_OFFSET))
        Hooked.on_load = Hooked.on_store = staticmethod(nothing)
        writer = ErrorLogWriter(memory)
        writer.record(OLD)
        (old,) = read_errors(memory)
        race = Interleaving(writer, first, num_steps, second)
        found = read_errors(memory)
        race.finish()
        Hooked.on_load = staticmethod(nothing)
        (new,) = read_errors(memory)
        assert new == LoggedError(NEW, 1, new.last_ns, new.last_ns)
        assert set(found) <= {old, new}
        seen.update(found)
        if num_steps >= TIME_IS_STORED and second == NEVER and first < READER_LOADS:
            # The last store publishes the entry; a writer that is killed before leaves none.
            assert found == ([new] if num_steps >= WRITER_STEPS - 1 else [])
    assert seen
