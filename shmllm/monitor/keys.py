"""Reads single keys from a terminal.

This module owns the terminal's mode while it reads keys, and the meaning of byte sequences. It
must not know the effect of a key.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from collections.abc import Iterator
from enum import Enum, auto


class Key(Enum):
    """A key that has a meaning."""

    QUIT = auto()
    UP = auto()
    DOWN = auto()
    ENTER = auto()
    BACK = auto()
    FASTER = auto()
    SLOWER = auto()


_MEANINGS = {
    b"q": Key.QUIT,
    b"\x1b": Key.QUIT,
    b"k": Key.UP,
    b"\x1b[A": Key.UP,
    b"\x1bOA": Key.UP,
    b"j": Key.DOWN,
    b"\x1b[B": Key.DOWN,
    b"\x1bOB": Key.DOWN,
    b"\r": Key.ENTER,
    b"\n": Key.ENTER,
    b"\x1b[C": Key.ENTER,
    b"b": Key.BACK,
    b"\x7f": Key.BACK,
    b"\x1b[D": Key.BACK,
    b"+": Key.FASTER,
    b"-": Key.SLOWER,
}
_SEQUENCE_LENGTH = 3


def parse(data: bytes) -> list[Key]:
    """The keys in the bytes from a terminal; bytes without a meaning are ignored."""
    keys = []
    while data:
        is_sequence = data[:2] in (b"\x1b[", b"\x1bO")
        length = _SEQUENCE_LENGTH if is_sequence else 1
        if (key := _MEANINGS.get(data[:length])) is not None:
            keys.append(key)
        data = data[length:]
    return keys


class Keyboard:
    """Reads keys from a terminal in cbreak mode.

    Args:
        fd: the file descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def wait(self, timeout_s: float) -> list[Key]:
        """Wait up to `timeout_s` for a key; returns all keys pressed so far, and QUIT at the end
        of the input."""
        ready, _, _ = select.select([self._fd], [], [], max(timeout_s, 0))
        if not ready:
            return []
        return parse(data) if (data := os.read(self._fd, 64)) else [Key.QUIT]


@contextlib.contextmanager
def keyboard(fd: int) -> Iterator[Keyboard]:
    """Set the terminal to cbreak mode without echo during the `with` block."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
