"""Calls in this thread during which no signal handler runs; the handlers run behind them.

`uninterrupted` calls a function in another thread instead. This suits functions that have to stay
in the thread of the caller, such as the steps of an engine: torch keeps threads and settings for
each thread. It costs about 60 us.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

Handler = Callable[[int, FrameType | None], object]

_NUMBERS = tuple(signal.valid_signals())


def call_with_signals_held(function: Callable[[], T]) -> T:
    """Call a function, and return its result. Signals that arrive meanwhile are handled behind it.

    A second Ctrl-C is handled at once, so that a person can end a function that hangs. Other
    threads run no signal handlers, so they only call the function.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    held = _HeldSignals()
    try:
        held.hold()
        return function()
    finally:
        try:
            held.restore()
        finally:
            # No call may come before this statement.
            held.are_held = False
            held.handle()


class _HeldSignals:
    """A handler in place of all others.

    Attributes:
        are_held: whether signals wait. If not, their own handlers get them, so nothing is lost if
            an exception ends `hold` or `restore`.
    """

    def __init__(self) -> None:
        self.are_held = True
        self._handlers: dict[int, Handler] = {}
        self._replaced: list[int] = []
        self._arrived: dict[int, FrameType | None] = {}

    def hold(self) -> None:
        """Take the place of the handlers of all signals that have one."""
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                self._replaced.append(number)  # before it is true: restoring does no harm
                signal.signal(number, self._take)

    def restore(self) -> None:
        """Give the handlers their places back."""
        try:
            while self._replaced:
                number = self._replaced[-1]
                signal.signal(number, self._handlers[number])
                del self._replaced[-1]
        finally:
            if self._replaced:  # a handler that has its place back raised an exception
                self.restore()

    def handle(self) -> None:
        """Run the handlers of the signals that arrived, also if one raises an exception."""
        if self._arrived:
            number, frame = self._arrived.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.handle()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.are_held and (number != signal.SIGINT or number not in self._arrived):
            self._arrived[number] = frame
        else:
            self._handlers[number](number, frame)
