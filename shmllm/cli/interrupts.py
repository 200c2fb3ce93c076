"""Makes SIGINT and SIGTERM end a command soon, with the exit code that shells expect."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator
from typing import Any

LEAVE_AFTER_S = 1.5
_FIRST_CODE = 128
ENDING = (signal.SIGINT, signal.SIGTERM)
EXIT_INTERRUPTED = _FIRST_CODE + signal.SIGINT


class Interrupted(KeyboardInterrupt):
    """A signal interrupted the command.

    Attributes:
        exit_code: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = _FIRST_CODE + number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Makes signals raise `Interrupted` inside; `LEAVE_AFTER_S` later the process exits.

    The exit does not wait for the engine, which may be in a long step. The engine notices the end
    of its front end, ends too and leaves no resources. The terminal gets back the mode that it had.
    """
    code, mode = _FIRST_CODE, _terminal_mode()

    def interrupt(number: int, frame: Any) -> None:
        nonlocal code
        error = Interrupted(number)
        code = error.exit_code
        signal.setitimer(signal.ITIMER_REAL, LEAVE_AFTER_S)
        raise error

    def leave(number: int, frame: Any) -> None:
        _restore_terminal(mode)
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


def _terminal_mode() -> list[Any] | None:
    """The mode of the terminal on stdin, or None if that is none."""
    with contextlib.suppress(OSError, termios.error):
        return termios.tcgetattr(0)
    return None


def _restore_terminal(mode: list[Any] | None) -> None:
    """Give the terminal on stdin a mode, unless another job has it: that would stop this one."""
    with contextlib.suppress(OSError, termios.error):
        if mode is not None and os.tcgetpgrp(0) == os.getpgrp():
            termios.tcsetattr(0, termios.TCSANOW, mode)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays signals that arrive inside until the end of the `with` block.

    It protects actions that must not be left half done, such as starting a process that this
    process has to end.
    """
    delayed: list[int] = []
    handled = (each for each in ENDING if callable(signal.getsignal(each)))
    before = {
        each: signal.signal(each, lambda number, _: delayed.append(number)) for each in handled
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for delayed_number in delayed:
            signal.raise_signal(delayed_number)
