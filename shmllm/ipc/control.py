"""The contents of the control segment, in which an engine publishes facts about itself.

The segment holds the engine's state, heartbeat, statistics, model, device and last words, the table
in which front ends ask to be accepted, and the word with which an operator stops the engine. The
engine process uses `ControlPage`, every other process `ControlView`. This module must not know what
a reader does with the values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from shmllm.ipc import layout
from shmllm.ipc.error_log import ErrorLogWriter, LoggedError, read_errors
from shmllm.ipc.histogram import Durations, HistogramWriter, read_histogram
from shmllm.ipc.layout import NONCE_STEP
from shmllm.ipc.segment import Segment, pid_namespace
from shmllm.ipc.states import Answer, EngineState
from shmllm.ipc.stats import Histogram, Mark, Stat
from shmllm.ipc.step_log import StepLogReader, StepLogWriter
from shmllm.ipc.words import Numbers, PlainWord, Word, WordTable

STALLED_AFTER_S = 5.0
_LONGEST_DRAIN_MS = 2**53
_ANSWERS = frozenset(Answer)
STAT_NAMES = tuple(stat.name.lower() for stat in Stat)


def histogram_offset(histogram: Histogram) -> int:
    """Byte offset of a histogram in the control segment."""
    return layout.CONTROL_HISTOGRAMS_OFFSET + histogram * layout.HISTOGRAM_WORDS * layout.WORD_BYTES


class _ControlWords:
    __slots__ = (
        "_accepted_at",
        "_answers",
        "_buffer",
        "_device",
        "_heartbeat",
        "_hello",
        "_last_words_size",
        "_marks",
        "_model",
        "_pid",
        "_pid_ns",
        "_precision",
        "_speculation",
        "_state",
        "_stats",
        "_stop",
        "_text",
    )

    def __init__(self, control: Segment) -> None:
        self._buffer = buffer = control.buffer[: layout.CONTROL_END_OFFSET]
        self._state = Word(buffer, layout.CONTROL_STATE_OFFSET)
        self._pid = Word(buffer, layout.CONTROL_ENGINE_PID_OFFSET)
        self._pid_ns = Word(buffer, layout.CONTROL_ENGINE_PID_NS_OFFSET)
        self._heartbeat = Word(buffer, layout.CONTROL_HEARTBEAT_OFFSET)
        self._stats = Numbers(buffer, layout.CONTROL_STATS_OFFSET, len(Stat))
        self._accepted_at = Numbers(
            buffer, layout.CONTROL_ACCEPTED_AT_OFFSET, layout.NUM_DRAFT_PLACES
        )
        self._marks = Numbers(buffer, layout.CONTROL_MARKS_OFFSET, len(Mark))
        self._last_words_size = Word(buffer, layout.CONTROL_LAST_WORDS_SIZE_OFFSET)
        self._answers = WordTable(buffer, layout.CONTROL_ANSWER_OFFSET, layout.NUM_CLIENTS)
        hellos = control.part(layout.CONTROL_HELLO_OFFSET, layout.NUM_CLIENTS * layout.WORD_BYTES)
        self._hello = WordTable(hellos, 0, layout.NUM_CLIENTS)
        self._stop = Word(control.part(layout.CONTROL_STOP_OFFSET, layout.WORD_BYTES), 0)
        begin = layout.CONTROL_LAST_WORDS_OFFSET
        self._text = buffer[begin : begin + layout.LAST_WORDS_BYTES]
        begin = layout.CONTROL_DEVICE_OFFSET
        self._device = buffer[begin : begin + layout.NAME_BYTES]
        begin = layout.CONTROL_PRECISION_OFFSET
        self._precision = buffer[begin : begin + layout.NAME_BYTES]
        begin = layout.CONTROL_SPECULATION_OFFSET
        self._speculation = buffer[begin : begin + layout.NAME_BYTES]
        begin = layout.CONTROL_MODEL_OFFSET
        self._model = buffer[begin : begin + layout.NAME_BYTES]

    def close(self) -> None:
        """Release the views of the segment, which the caller closes itself; idempotent."""
        self._text.release()
        self._device.release()
        self._precision.release()
        self._speculation.release()
        self._model.release()
        self._buffer.release()
        words: tuple[PlainWord | WordTable | Numbers, ...] = (
            self._state,
            self._pid,
            self._pid_ns,
            self._heartbeat,
            self._last_words_size,
            self._hello,
            self._answers,
            self._stop,
            self._stats,
            self._accepted_at,
            self._marks,
        )
        for part in words:
            part.close()


class ControlPage(_ControlWords):
    """The writer of a control segment. Only the engine process creates one; the constructor
    publishes the process's pid.

    Args:
        control: the engine's control segment.

    Attributes:
        errors: the writer of the error log.
    """

    __slots__ = ("errors",)

    def __init__(self, control: Segment) -> None:
        super().__init__(control)
        self.errors = ErrorLogWriter(self._buffer)
        self._pid_ns.store(pid_namespace())
        self._pid.store(os.getpid())

    def set_state(self, state: EngineState) -> None:
        """Publish the engine's state."""
        self._state.store(state)

    def beat(self) -> None:
        """Store the current time as the heartbeat of the engine's main loop."""
        self._heartbeat.store(time.monotonic_ns())

    @property
    def set_stat(self) -> Callable[[int, int], None]:
        """A function (stat, value) that replaces one statistics word by a value of 0 or more."""
        return self._stats.store

    def set_accepted_at(self, counts: Iterable[int]) -> None:
        """Replace the numbers of accepted tokens by their place in the draft."""
        self._accepted_at.store_all(counts)

    def set_device(self, name: str) -> None:
        """Publish the name of the device that runs the model. The engine calls this once, before
        it is READY. A name above 128 bytes loses its end."""
        _store_name(self._device, name)

    def set_precision(self, text: str) -> None:
        """Publish what the model is computed in. The engine calls this once, before it is READY. A
        text above 128 bytes loses its end."""
        _store_name(self._precision, text)

    def set_speculation(self, text: str) -> None:
        """Publish who drafts tokens, if somebody does. The engine calls this once, before it is
        READY. A text above 128 bytes loses its end."""
        _store_name(self._speculation, text)

    def set_model(self, name: str) -> None:
        """Publish the name of the model. The engine calls this once, before it loads the model. A
        name above 128 bytes loses its end."""
        _store_name(self._model, name)

    def mark(self, mark: Mark) -> None:
        """Store the current time as the time of this event of the engine's start."""
        self._marks.store(mark, time.monotonic_ns())

    def hellos(self) -> list[int]:
        """For each place, the nonce of the last front end that asked to be accepted; 0: none."""
        # SYNC POINT: client hello
        return self._hello.load_all()

    def answer(self, place: int, nonce: int, answer: Answer) -> None:
        """Tell the front end in `place` whether the engine accepted it, or why it did not or
        disconnected it. The front end with another nonce does not believe the answer."""
        # SYNC POINT: client accepted
        self._answers.store(place, nonce - nonce % NONCE_STEP + answer)

    def stop_request(self) -> float | None:
        """The seconds that an operator gives unfinished requests to end, if an operator asked the
        engine to stop; None otherwise."""
        # SYNC POINT: stop requested
        value = self._stop.load()
        return (value - 1) / 1000 if value else None

    def histogram(self, histogram: Histogram) -> HistogramWriter:
        """The writer of one histogram; the caller closes it."""
        return HistogramWriter(self._buffer, histogram_offset(histogram))

    def step_log(self) -> StepLogWriter:
        """The writer of the step log; the caller closes it."""
        return StepLogWriter(self._buffer)

    def set_last_words(self, text: str) -> None:
        """Store the cause of the engine's death. A text above 16 KiB loses its beginning, because
        a traceback names the cause at its end."""
        encoded = text.encode("utf-8", errors="replace")[-layout.LAST_WORDS_BYTES :]
        self._last_words_size.store(0)
        self._text[: len(encoded)] = encoded
        # SYNC POINT: last words. The size is stored after the text.
        self._last_words_size.store(len(encoded))


class ControlView(_ControlWords):
    """The reader of a control segment.

    A front end also writes its own word of the hello table, and an operator the stop word; each
    must have mapped the segment with its `Access`.

    Args:
        control: the control segment of an engine.
    """

    __slots__ = ()

    @property
    def engine_state(self) -> EngineState:
        """The last state that the engine stored; a killed engine does not update it."""
        return EngineState(self._state.load())

    @property
    def engine_pid(self) -> int:
        """The engine's pid in its own pid namespace; 0 until the engine has attached."""
        return self._pid.load()

    @property
    def heartbeat_ns(self) -> int:
        """The time of the engine's last heartbeat on `time.monotonic_ns()`; 0 before the first."""
        return self._heartbeat.load()

    def stat(self, stat: Stat) -> int:
        """One value of the statistics."""
        return self._stats.load(stat)

    def stats(self) -> dict[str, int]:
        """All values of the statistics, by the lower-case name of the Stat; "accepted_at_0" and
        so on are the accepted tokens by their place in the draft, as many as there may be."""
        stats = dict(zip(STAT_NAMES, self._stats.load_all(), strict=True))
        places = range(stats["num_speculative_tokens"])
        accepted = zip(places, self._accepted_at.load_all(), strict=False)
        return stats | {f"accepted_at_{place}": count for place, count in accepted}

    def durations(self, histogram: Histogram) -> Durations:
        """The durations in one histogram, counted since the engine's start."""
        return read_histogram(self._buffer, histogram_offset(histogram))

    def all_durations(self) -> dict[Histogram, Durations]:
        """The durations in all histograms, counted since the engine's start."""
        return {histogram: self.durations(histogram) for histogram in Histogram}

    def step_log(self) -> StepLogReader:
        """The reader of the step log; the caller closes it."""
        return StepLogReader(self._buffer)

    def mark_ns(self, mark: Mark) -> int:
        """The time of an event of the engine's start on `time.monotonic_ns()`; 0 before it."""
        return self._marks.load(mark)

    def device(self) -> str:
        """The name of the device that runs the model; "" until the engine is ready."""
        return _load_name(self._device)

    def precision(self) -> str:
        """What the model is computed in; "" until the engine is ready."""
        return _load_name(self._precision)

    def speculation(self) -> str:
        """Who drafts tokens; "" until the engine is ready, and if nobody does."""
        return _load_name(self._speculation)

    def model(self) -> str:
        """The name of the model; "" until the engine has its configuration."""
        return _load_name(self._model)

    def last_words(self) -> str:
        """The cause of the engine's death, or "" if the engine could not store one."""
        # SYNC POINT: last words
        size = min(self._last_words_size.load(), layout.LAST_WORDS_BYTES)
        return bytes(self._text[:size]).decode("utf-8", errors="replace")

    def errors(self) -> list[LoggedError]:
        """The distinct errors that the engine has recorded, the latest one last."""
        return read_errors(self._buffer)

    @property
    def engine_pid_namespace(self) -> int:
        """Inode of the pid namespace in which `engine_pid` is valid."""
        return self._pid_ns.load()

    def say_hello(self, place: int, nonce: int) -> None:
        """Ask the engine to accept the front end with this nonce. Only the front end that
        claimed `place` may write that place's word."""
        # SYNC POINT: client hello. The front end names its segment before this store.
        self._hello.store(place, nonce)

    def hello(self, place: int) -> int:
        """The nonce that was last stored for `place`."""
        return self._hello.load(place)

    def answer(self, place: int, nonce: int) -> Answer | None:
        """The engine's answer for the front end in `place` with this nonce; None if the last
        answer there was for another front end."""
        # SYNC POINT: client accepted
        value = self._answers.load(place) - nonce
        return Answer(value) if value in _ANSWERS else None

    def request_stop(self, drain_s: float) -> None:
        """Ask the engine to take no new requests, and to end when its requests have ended or
        `drain_s` seconds have passed. The caller then posts the engine's doorbell."""
        # SYNC POINT: stop requested
        self._stop.store(1 + min(round(drain_s * 1000), _LONGEST_DRAIN_MS))

    @property
    def is_stop_requested(self) -> bool:
        """Whether an operator asked the engine to stop."""
        return self._stop.load() != 0

    def describe(self) -> str:
        """The engine's state in words. An engine that is READY but had no heartbeat for
        STALLED_AFTER_S, or of which a signal has stopped a rank, is described as stalled, with the
        number of its step."""
        state = self.engine_state
        if state is EngineState.READY and (pid := self.stat(Stat.STOPPED_RANK)):
            return f"stalled in step {self.stat(Stat.STEPS)}: its process {pid} is stopped"
        silent_s = (time.monotonic_ns() - self.heartbeat_ns) / 1e9 if self.heartbeat_ns else 0.0
        if state is EngineState.READY and silent_s >= STALLED_AFTER_S:
            return f"stalled {silent_s:.0f} s in step {self.stat(Stat.STEPS)}"
        return state.name.lower().replace("_", " ")


def _store_name(field: memoryview, name: str) -> None:
    encoded = name.encode("utf-8", errors="replace")[: len(field)]
    field[: len(encoded)] = encoded


def _load_name(field: memoryview) -> str:
    return bytes(field).rstrip(b"\0").decode("utf-8", errors="replace")
