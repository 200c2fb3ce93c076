"""The standard streams of a command, which its caller may have closed (`>&-`)."""

from __future__ import annotations

import contextlib
import os
import sys

# (descriptor, flags): stdin is empty, writing to stdout fails with EBADF, and stderr takes all.
_REPLACEMENTS = ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))


def replace_closed_streams() -> None:
    """Open a file in place of each closed stream: otherwise, the next file that the process opens
    would get its number, and what is written to the stream would go into that file."""
    for number, flags in _REPLACEMENTS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest number that is free
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def check_stdout() -> None:
    """Raise OSError if stdout was closed."""
    os.write(1, b"")


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
