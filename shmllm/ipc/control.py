"""The control segment's contents: what an engine tells everybody about itself.

Owns state, heartbeat, statistics, device and last words, with one class for the engine that writes
them and one for whoever reads. Must not know who that is or what follows from a state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from shmllm.ipc import layout
from shmllm.ipc.histogram import Durations, HistogramWriter, read_histogram
from shmllm.ipc.layout import EngineState
from shmllm.ipc.segment import Segment, pid_namespace
from shmllm.ipc.stats import Histogram, Mark, Stat
from shmllm.ipc.step_log import StepLogReader, StepLogWriter
from shmllm.ipc.words import Numbers, PlainWord, Word, WordTable

STALLED_AFTER_S = 5.0
STAT_NAMES = tuple(stat.name.lower() for stat in Stat)


def histogram_offset(histogram: Histogram) -> int:
    """Where it lies in the control segment."""
    return layout.CONTROL_HISTOGRAMS_OFFSET + histogram * layout.HISTOGRAM_WORDS * layout.WORD_BYTES


class _ControlWords:
    __slots__ = (
        "_admitted",
        "_buffer",
        "_device",
        "_heartbeat",
        "_hello",
        "_last_words_size",
        "_marks",
        "_pid",
        "_pid_ns",
        "_state",
        "_stats",
        "_text",
    )

    def __init__(self, control: Segment) -> None:
        self._buffer = buffer = control.buffer[: layout.CONTROL_END_OFFSET]
        self._state = Word(buffer, layout.CONTROL_STATE_OFFSET)
        self._pid = Word(buffer, layout.CONTROL_ENGINE_PID_OFFSET)
        self._pid_ns = Word(buffer, layout.CONTROL_ENGINE_PID_NS_OFFSET)
        self._heartbeat = Word(buffer, layout.CONTROL_HEARTBEAT_OFFSET)
        self._stats = Numbers(buffer, layout.CONTROL_STATS_OFFSET, len(Stat))
        self._marks = Numbers(buffer, layout.CONTROL_MARKS_OFFSET, len(Mark))
        self._last_words_size = Word(buffer, layout.CONTROL_LAST_WORDS_SIZE_OFFSET)
        self._hello = WordTable(buffer, layout.CONTROL_HELLO_OFFSET, layout.NUM_CLIENTS)
        self._admitted = WordTable(buffer, layout.CONTROL_ADMITTED_OFFSET, layout.NUM_CLIENTS)
        begin = layout.CONTROL_LAST_WORDS_OFFSET
        self._text = buffer[begin : begin + layout.LAST_WORDS_BYTES]
        begin = layout.CONTROL_DEVICE_OFFSET
        self._device = buffer[begin : begin + layout.DEVICE_BYTES]

    def close(self) -> None:
        """Let go of the segment, which stays the caller's to close; idempotent."""
        self._text.release()
        self._device.release()
        self._buffer.release()
        words: tuple[PlainWord | WordTable | Numbers, ...] = (
            self._state,
            self._pid,
            self._pid_ns,
            self._heartbeat,
            self._last_words_size,
            self._hello,
            self._admitted,
            self._stats,
            self._marks,
        )
        for part in words:
            part.close()


class ControlPage(_ControlWords):
    """The engine's end. Only the engine process makes one; it announces its pid at once.

    Args:
        control: the engine's segment.
    """

    __slots__ = ()

    def __init__(self, control: Segment) -> None:
        super().__init__(control)
        self._pid_ns.store(pid_namespace())
        self._pid.store(os.getpid())

    def set_state(self, state: EngineState) -> None:
        """Say where in its life the engine is."""
        self._state.store(state)

    def beat(self) -> None:
        """Say that the loop is alive now."""
        self._heartbeat.store(time.monotonic_ns())

    @property
    def set_stat(self) -> Callable[[int, int], None]:
        """Replaces one statistics word, a Stat, by a number from 0 on."""
        return self._stats.store

    def set_device(self, name: str) -> None:
        """Say, once and before READY, what the model runs on. Of a long name the start is kept."""
        encoded = name.encode("utf-8", errors="replace")[: layout.DEVICE_BYTES]
        self._device[: len(encoded)] = encoded

    def mark(self, mark: Mark) -> None:
        """Note that this moment of the engine's start is now."""
        self._marks.store(mark, time.monotonic_ns())

    def hellos(self) -> list[int]:
        """For each place the nonce of the client that wants, or wanted last, to be there."""
        # SYNC POINT: client hello
        return self._hello.load_all()

    def admit(self, place: int, answer: int) -> None:
        """Answer the client in `place`: its own nonce, or a Refusal."""
        # SYNC POINT: client admitted
        self._admitted.store(place, answer)

    def histogram(self, histogram: Histogram) -> HistogramWriter:
        """Where durations of one sort are counted; to be closed by the caller."""
        return HistogramWriter(self._buffer, histogram_offset(histogram))

    def step_log(self) -> StepLogWriter:
        """Where steps are logged; to be closed by the caller."""
        return StepLogWriter(self._buffer)

    def set_last_words(self, text: str) -> None:
        """Leave a cause of death. Of a text above 16 KiB the end is kept, where causes stand."""
        encoded = text.encode("utf-8", errors="replace")[-layout.LAST_WORDS_BYTES :]
        self._last_words_size.store(0)
        self._text[: len(encoded)] = encoded
        # SYNC POINT: last words. After the text.
        self._last_words_size.store(len(encoded))


class ControlView(_ControlWords):
    """Anybody's end: reads only, but for a client's own word in the hello table.

    Args:
        control: an engine's segment.
    """

    __slots__ = ()

    @property
    def engine_state(self) -> EngineState:
        """What the engine says about itself; a killed one says nothing more."""
        return EngineState(self._state.load())

    @property
    def engine_pid(self) -> int:
        """The engine's pid in its own namespace, 0 before it attached."""
        return self._pid.load()

    @property
    def heartbeat_ns(self) -> int:
        """When the engine last beat, on `time.monotonic_ns()`; 0 before the first time."""
        return self._heartbeat.load()

    def stat(self, stat: Stat) -> int:
        """One number from the statistics page."""
        return self._stats.load(stat)

    def stats(self) -> dict[str, int]:
        """All statistics, by lower-case name."""
        return dict(zip(STAT_NAMES, self._stats.load_all(), strict=True))

    def durations(self, histogram: Histogram) -> Durations:
        """How long something took since the start, each time."""
        return read_histogram(self._buffer, histogram_offset(histogram))

    def all_durations(self) -> dict[Histogram, Durations]:
        """The same of each sort."""
        return {histogram: self.durations(histogram) for histogram in Histogram}

    def step_log(self) -> StepLogReader:
        """The latest steps; to be closed by the caller."""
        return StepLogReader(self._buffer)

    def mark_ns(self, mark: Mark) -> int:
        """When a moment of the start was, on `time.monotonic_ns()`; 0 if it was not yet."""
        return self._marks.load(mark)

    def device(self) -> str:
        """What the model runs on; empty before the engine is ready."""
        return bytes(self._device).rstrip(b"\0").decode("utf-8", errors="replace")

    def last_words(self) -> str:
        """Why the engine died, if it could still say so."""
        # SYNC POINT: last words
        size = min(self._last_words_size.load(), layout.LAST_WORDS_BYTES)
        return bytes(self._text[:size]).decode("utf-8", errors="replace")

    @property
    def engine_pid_namespace(self) -> int:
        """Inode of the pid namespace that `engine_pid` counts in."""
        return self._pid_ns.load()

    def say_hello(self, place: int, nonce: int) -> None:
        """Ask to be admitted. Only the client that claimed `place` writes its word."""
        # SYNC POINT: client hello. After its segment was named.
        self._hello.store(place, nonce)

    def admitted(self, place: int) -> int:
        """The engine's answer for `place`: a nonce, or a Refusal."""
        # SYNC POINT: client admitted
        return self._admitted.load(place)

    def describe(self) -> str:
        """The engine's state in words, as far as it can tell: one that has not beaten for
        STALLED_AFTER_S is called stalled, and in which step."""
        state = self.engine_state
        silent_s = (time.monotonic_ns() - self.heartbeat_ns) / 1e9 if self.heartbeat_ns else 0.0
        if state is EngineState.READY and silent_s >= STALLED_AFTER_S:
            return f"stalled {silent_s:.0f} s in step {self.stat(Stat.STEPS)}"
        return state.name.lower().replace("_", " ")
