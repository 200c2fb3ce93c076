"""Programs in a pseudo-terminal that a test reads and types into."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
from support.programs import CLI, environment
from support.waiting import PATIENCE_S

pyte = pytest.importorskip("pyte")

PIECE_BYTES = 512
# A session's first process gets the terminal that it opens, with the keys that send signals.

WITH_KEYS = "import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); "


class Terminal:
    """A program in a pseudo-terminal, and what it shows there.

    Args:
        command: the program and its arguments.
        columns, lines: the size of the terminal.
        env: changes of the environment.
    """

    def __init__(
        self,
        *command: str,
        columns: int = 80,
        lines: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self.resize(columns, lines)
        self._mode = termios.tcgetattr(self._master)
        variables = environment({"TERM": "xterm-256color"} | dict(env or {}))
        del variables["COLUMNS"]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables,
            start_new_session=True,
        )
        os.close(slave)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def type(self, keys: bytes) -> None:
        """Enter keys, and read what the program shows meanwhile: neither side waits for the
        other."""
        for begin in range(0, len(keys), PIECE_BYTES):
            os.write(self._master, keys[begin : begin + PIECE_BYTES])
            while self._read(0):
                pass

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def marked_line(self) -> str:
        """The line that is shown in reverse video."""
        for y, line in enumerate(self.screen.display):
            if self.screen.buffer[y][0].reverse:
                return str(line)
        return ""

    def shows(self, condition: Callable[[str], bool], limit_s: float = PATIENCE_S) -> bool:
        """Whether the text on the screen fulfils a condition in time."""
        deadline = time.monotonic() + limit_s
        while not condition(self.text()):
            if time.monotonic() >= deadline:
                return False
            self._read()
        return True

    def ends(self) -> int:
        """Read the screen to its end; return the exit code. The terminal's mode must be what it
        was."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        code = self.process.wait(0)
        while self._read():
            pass
        assert termios.tcgetattr(self._master) == self._mode
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._master)

    def _read(self, wait_s: float = 0.1) -> bool:
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody has the other end open
            return False
        self.output += data
        self._stream.feed(data)
        return bool(data)


@contextmanager
def opened_terminal(
    *arguments: str,
    cli: str = CLI,
    columns: int = 80,
    lines: int = 24,
    env: Mapping[str, str] | None = None,
) -> Iterator[Terminal]:
    """The command `shmllm` in a terminal, until the end of the block.

    Args:
        arguments: of the command.
        cli: the source text that stands for it.
        columns, lines, env: as for Terminal.
    """
    source = WITH_KEYS + cli
    opened = Terminal(
        sys.executable, "-c", source, *arguments, columns=columns, lines=lines, env=env
    )
    try:
        yield opened
    finally:
        opened.close()
