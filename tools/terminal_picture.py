"""Draws what a program shows in a terminal, as an SVG picture for the documentation.

    python tools/terminal_picture.py docs/images/chat.svg --title "shmllm chat" \\
        --step '>>> ' 'Why is the sky blue?\\r' --step 'tok/s' '' -- shmllm chat -m smollm2

The program runs in a pseudo-terminal. Each `--step PATTERN KEYS` waits until the pattern, a regular
expression, stands on the screen again, and then types the keys. The picture shows the screen after
the last step. Needs pyte, which `pip install '.[test]'` brings.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import click
import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

QUIET_S = 0.5
"""A step is over when the pattern stands on the screen and nothing came for this time."""


class Terminal:
    """A program in a pseudo-terminal whose screen can be read.

    Args:
        command: the program and its arguments.
        columns, lines: the size of the screen, in characters.
    """

    def __init__(self, command: tuple[str, ...], columns: int, lines: int) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execvp(command[0], command)
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> None:
        """Read until the pattern stands on the screen and the program is quiet.

        Raises:
            TimeoutError: that did not happen in time; the message has the screen.
        """
        end = time.monotonic() + timeout_s
        while self._read(QUIET_S) or not pattern.search(self.text):
            if time.monotonic() > end:
                raise TimeoutError(f"no {pattern.pattern!r} in:\n{self.text}")

    def type(self, keys: str) -> None:
        """Type the keys."""
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        """End the program."""
        os.kill(self._pid, signal.SIGTERM)
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    @property
    def text(self) -> str:
        """The text on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def _read(self, timeout_s: float) -> bool:
        """Whether the program wrote something within the time."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the program has ended
            return False
        self._stream.feed(self._decoder.decode(data))
        return bool(data)


def picture(screen: pyte.Screen, title: str) -> str:
    """The SVG picture of a screen, without the empty lines at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=screen.columns, file=nowhere, color_system="truecolor")
        used = [number for number, line in enumerate(screen.display) if line.strip()]
        for number in range(max(used, default=0) + 1):
            line = Text(no_wrap=True)
            for column in range(screen.columns):
                cell = screen.buffer[number][column]
                line.append(cell.data, _style(cell))
            console.print(line, soft_wrap=True)
        return console.export_svg(title=title, theme=SVG_EXPORT_THEME)


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_color(cell.fg), bgcolor=_color(cell.bg), bold=cell.bold, reverse=cell.reverse
    )


def _color(name: str) -> str | None:
    """The name of a color of pyte, as rich spells it."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return {"brown": "yellow"}.get(name, re.sub("^bright(?=[a-z])", "bright_", name))


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("command", nargs=-1, required=True)
@click.option("--title", required=True, help="Title of the window.")
@click.option("--columns", default=80, show_default=True)
@click.option("--lines", default=24, show_default=True)
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for each step.")
@click.option(
    "--step",
    "steps",
    type=(str, str),
    multiple=True,
    metavar="PATTERN KEYS",
    help="Wait for PATTERN, then type KEYS, in which \\r is the return key.",
)
def main(
    output: Path,
    command: tuple[str, ...],
    title: str,
    columns: int,
    lines: int,
    timeout: float,
    steps: tuple[tuple[str, str], ...],
) -> None:
    """Run COMMAND in a terminal, and draw its screen into the file OUTPUT."""
    terminal = Terminal(command, columns, lines)
    try:
        for pattern, keys in steps:
            terminal.wait_for(re.compile(pattern), timeout)
            terminal.type(codecs.decode(keys, "unicode_escape"))
        output.write_text(picture(terminal.screen, title), encoding="utf-8")
    except TimeoutError as error:
        sys.exit(str(error))
    finally:
        terminal.close()


if __name__ == "__main__":
    main()
