"""Signals at every line: a tracer that lets one arrive at the n-th line, call or return."""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNAL = signal.SIGUSR1


class Interrupted(BaseException):
    """What the handler of the signal raises."""


class Moment:
    """A signal at the n-th traced point of a call.

    The handler runs where the interpreter runs it for a real signal that arrives at this point: at
    the next call, beginning of a function or end of a loop's turn. An exception raised by the
    tracer itself could also come between the body of a `with` block and its exit, where no signal
    handler ever runs, and which no program can survive.

    Args:
        number: the number of the point, from 1 on.
        files: parts of the paths of the traced modules.

    Attributes:
        where: the function, line and event; None if the call ended before.
    """

    def __init__(self, number: int, files: Sequence[str]) -> None:
        self._left = number
        self._files = tuple(files)
        self.where: tuple[str, int, str] | None = None

    def call(self, function: Callable[[], Any]) -> bool:
        """Call a function. Returns whether the signal ended it; other exceptions are raised."""
        try:
            try:
                sys.settrace(self._trace)
                function()
            finally:
                sys.settrace(None)
            for _ in range(2):  # the signal may have arrived at the last point
                pass
        except Interrupted:
            return True
        return False

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not any(each in frame.f_code.co_filename for each in self._files):
            return None
        if event != "exception":
            self._left -= 1
            if not self._left:
                code = frame.f_code
                self.where = getattr(code, "co_qualname", code.co_name), frame.f_lineno, event
                arrival = map(_thread.interrupt_main, (SIGNAL,))
                sys.settrace(None)
                _ = [*arrival]  # not a call, after which the handler would run here
                return None
        return self._trace


@contextmanager
def raising_handler(is_twice: bool = False) -> Iterator[None]:
    """A context in which SIGNAL raises Interrupted.

    Args:
        is_twice: a second signal arrives as soon as the handler of the first one has raised.
    """
    arrivals = map(_thread.interrupt_main, (SIGNAL,) if is_twice else ())

    def interrupt(number: int, frame: FrameType | None) -> None:
        _ = [*arrivals]
        raise Interrupted

    before = signal.signal(SIGNAL, interrupt)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)
