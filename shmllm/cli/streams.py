"""The standard streams of a command, which may be closed (`>&-`) or full."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

# (descriptor, flags): stdin is empty, writing to stdout fails with EBADF, and stderr takes all.
_REPLACEMENTS = ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))


class _BestEffort(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def replace_streams() -> None:
    """Open a file in place of each closed stream, and make stderr take all.

    Without it, the next file that the process opens would get the number of a closed stream, and
    what is written to the stream would go into that file. A remark that cannot be written, because
    a disk is full or a pipe's reader has ended, must not end a command that writes a result.
    """
    for number, flags in _REPLACEMENTS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest number that is free
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    remarks = io.BufferedWriter(_BestEffort(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(remarks, encoding, "backslashreplace", line_buffering=True)


@contextlib.contextmanager
def quiet_closed_pipe() -> Iterator[None]:
    """End the block without an error when the reader of stdout has closed it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        drop_unwritten()


def _has_lost_reader() -> bool:
    """Whether stdout is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def check_stdout() -> None:
    """Raise OSError if stdout was closed."""
    os.write(1, b"")


def is_on_screen() -> bool:
    """Whether stdout and stderr are terminals: what is drawn on one would be in the other's way."""
    return os.isatty(1) and os.isatty(2)


def drop_unwritten() -> None:
    """Drop what cannot be written to stdout, so that the interpreter does not try it again."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
