"""SIGINT and SIGTERM end a command soon, and with the exit code that shells expect."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

LEAVE_AFTER_S = 1.5
_FIRST_CODE = 128
ENDING = (signal.SIGINT, signal.SIGTERM)
EXIT_INTERRUPTED = _FIRST_CODE + signal.SIGINT


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end.

    Attributes:
        exit_code: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = _FIRST_CODE + number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Signals raise `Interrupted` inside, and after `LEAVE_AFTER_S` the process is gone.

    An engine may be deep in a step when its front end wants to leave. It then ends by
    itself, behind a front end that is no more, and leaves nothing.
    """
    code = _FIRST_CODE

    def interrupt(number: int, frame: Any) -> None:
        nonlocal code
        error = Interrupted(number)
        code = error.exit_code
        signal.setitimer(signal.ITIMER_REAL, LEAVE_AFTER_S)
        raise error

    def leave(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(code)

    handlers = {signal.SIGTERM: interrupt, signal.SIGALRM: leave}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a background job
        handlers[signal.SIGINT] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that come inside take effect behind it: for what must not be left half done, such as
    starting a process that somebody has to end."""
    came: list[int] = []
    wanted = (each for each in ENDING if callable(signal.getsignal(each)))
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for came_in in came:
            signal.raise_signal(came_in)
