"""The error log in the control segment: each distinct error once, with a count and two times.

The engine process writes the log, and any process reads it, also after the engine's death. This
module decides which errors are the same and ensures that a reader never gets a half-written entry.
It must not know what an engine does after an error.

Two errors are the same if their texts differ in numbers only: a front end that fails in every new
connection fills one entry and not the log. The entry shows the text of the last occurrence. When
all entries are taken, a new error replaces one of the place that has most of them: the one that has
not occurred for the longest time. So a front end that causes many errors hides only its own.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shmllm.ipc import layout
from shmllm.ipc.words import Word, fence

READ_ATTEMPTS = 1000
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_ELLIPSIS = "..."
_MOST_CHARACTERS = 16 * layout.ERROR_TEXT_BYTES
"""Those of a text that `record` looks at: a faulty front end can cause a text of any length."""


@dataclass(frozen=True, slots=True)
class LoggedError:
    """An entry of the error log.

    Attributes:
        text: what happened last, in one line.
        count: how often it happened.
        first_ns: when it happened first, in ns since 1970.
        last_ns: when it happened last, in ns since 1970.
    """

    text: str
    count: int
    first_ns: int
    last_ns: int


class _Entry:
    """The words and the text of one entry."""

    __slots__ = ("count", "first", "last", "size", "text")

    def __init__(self, buffer: memoryview, index: int) -> None:
        begin = layout.CONTROL_ERRORS_OFFSET + index * layout.ERROR_ENTRY_BYTES
        self.count = Word(buffer, begin + layout.ERROR_COUNT_OFFSET)
        self.first = Word(buffer, begin + layout.ERROR_FIRST_OFFSET)
        self.last = Word(buffer, begin + layout.ERROR_LAST_OFFSET)
        self.size = Word(buffer, begin + layout.ERROR_TEXT_SIZE_OFFSET)
        begin += layout.ERROR_TEXT_OFFSET
        self.text = buffer[begin : begin + layout.ERROR_TEXT_BYTES]

    def __enter__(self) -> _Entry:
        return self

    def __exit__(self, *_: object) -> None:
        self.text.release()
        for word in (self.count, self.first, self.last, self.size):
            word.close()


@dataclass(frozen=True, slots=True)
class _Known:
    """What the writer remembers of an entry."""

    index: int
    count: int
    first_ns: int


class ErrorLogWriter:
    """Writes the error log of a new control segment; only the engine process creates one.

    Args:
        buffer: the bytes of the control segment, which the caller releases.
    """

    __slots__ = ("_buffer", "_known", "_last_ns")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._last_ns = 0
        # The entries by the place and the kind of their texts, the latest entry last.
        self._known: dict[tuple[int | None, str], _Known] = {}

    def record(self, text: str, place: int | None = None) -> None:
        """Count an error.

        Args:
            text: what happened; it loses its end above 480 bytes of UTF-8.
            place: the place of the front end that caused it; None if none did.
        """
        text = _one_line(text[:_MOST_CHARACTERS])
        kind = place, _NUMBER.sub("#", text)[: layout.ERROR_TEXT_BYTES]
        # Different for each occurrence, which the reader relies on.
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        if kind in self._known:
            known = self._known.pop(kind)
        else:
            known = _Known(self._free_index(), 0, self._last_ns)
        self._known[kind] = known = replace(known, count=known.count + 1)
        self._write(known.index, _cut(text), known.count, known.first_ns)

    def _free_index(self) -> int:
        if len(self._known) < layout.NUM_ERRORS:
            return len(self._known)
        [(most, _)] = Counter(place for place, _ in self._known).most_common(1)
        oldest = next(kind for kind in self._known if kind[0] == most)
        return self._known.pop(oldest).index

    def _write(self, index: int, text: bytes, count: int, first_ns: int) -> None:
        with _Entry(self._buffer, index) as entry:
            # SYNC POINT: error logged. The count is 0 before the time changes, the time changes
            # before the rest does, and the count is stored last. On a machine that reorders, each
            # store of a word has a fence before it.
            entry.count.store(0)
            entry.last.store(self._last_ns)
            entry.first.store(first_ns)
            entry.size.store(len(text))
            entry.text[: len(text)] = text
            entry.count.store(count)


def read_errors(buffer: memoryview) -> list[LoggedError]:
    """All errors in the log, the latest one last. An entry that its writer did not finish before
    it was killed is left out.

    Args:
        buffer: the bytes of the control segment, which may be read-only.
    """
    found = []
    for index in range(layout.NUM_ERRORS):
        with _Entry(buffer, index) as entry:
            if not entry.last.load():  # the writer takes free entries in the order of the indexes
                break
            error = _read(entry)
        if error is not None:
            found.append(error)
    return sorted(found, key=lambda error: error.last_ns)


def _read(entry: _Entry) -> LoggedError | None:
    for _ in range(READ_ATTEMPTS):
        # SYNC POINT: error logged. The time is loaded before the count and again after the text.
        # If both times are equal, then the count of that time is either 0 or was stored after all
        # of the entry, and no later writing of the entry has begun before the text was loaded.
        last_ns = entry.last.load()
        count = entry.count.load()
        first_ns = entry.first.load()
        text = bytes(entry.text[: min(entry.size.load(), layout.ERROR_TEXT_BYTES)])
        fence()  # keeps the loads of the text before the second load of the time
        if count and entry.last.load() == last_ns:
            return LoggedError(text.decode("utf-8", errors="replace"), count, first_ns, last_ns)
    return None


def cut_off(pid: int, place: int, reason: str) -> str:
    """The text of the error that the engine disconnected a front end."""
    return f"{front_end(pid, place)} was cut off: {reason}"


def refused(place: int, reason: str) -> str:
    """The text of the error that the engine did not accept a front end, whose pid may not be
    known."""
    return f"a front end in place {place} was refused: {reason}"


def front_end(pid: int, place: int) -> str:
    """The name of a front end in the texts of errors."""
    return f"front end {pid} in place {place}"


def reason_for(errors: Iterable[LoggedError], pid: int, place: int, since_ns: int) -> str:
    """The reason why a front end was cut off or refused.

    Args:
        errors: the errors, the latest one last.
        pid: the pid of the front end.
        place: its place.
        since_ns: when the front end attached, in ns since 1970; earlier errors are of others.

    Returns:
        "" if the log has no such error, or a later one of another front end in its entry.
    """
    reason = ""
    for error in errors:
        for prefix in (cut_off(pid, place, ""), refused(place, "")):
            if error.last_ns >= since_ns and error.text.startswith(prefix):
                reason = error.text.removeprefix(prefix)
    return reason


def _one_line(text: str) -> str:
    """The text without line breaks, and without characters that change a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _cut(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) <= layout.ERROR_TEXT_BYTES:
        return encoded
    kept = encoded[: layout.ERROR_TEXT_BYTES - len(_ELLIPSIS)]
    return (kept.decode(errors="ignore") + _ELLIPSIS).encode()
