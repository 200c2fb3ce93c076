"""Draws what a program shows in a terminal, as an SVG picture for the documentation.

    python tools/terminal_picture.py docs/images/chat.svg --title "shmllm chat" \\
        --step '>>> ' 'Why is the sky blue?\\r' --step 'tok/s' '' -- shmllm chat -m smollm2

The program runs in a pseudo-terminal. Each `--step PATTERN KEYS` waits until the pattern, a regular
expression, stands on the screen again, and then types the keys. The picture shows the screen after
the last step. Needs pyte, which `pip install '.[test]'` brings.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

if TYPE_CHECKING:
    from support.terminals import Terminal

TESTS = Path(__file__).resolve().parents[1] / "tests"
QUIET_S = 0.5
"""Nothing may be left to read for this time before keys are typed."""


def open_terminal(command: tuple[str, ...], columns: int, lines: int) -> Terminal:
    """A program in the pseudo-terminal of the tests."""
    sys.path.insert(0, str(TESTS))
    from support.terminals import Terminal

    return Terminal(*command, columns=columns, lines=lines)


def stands_in(pattern: str, text: str) -> bool:
    """Whether a text has a match of a regular expression."""
    return re.search(pattern, text) is not None


def picture(screen: Any, title: str) -> str:
    """The SVG picture of a pyte.Screen, without the empty lines at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=screen.columns, file=nowhere, color_system="truecolor")
        used = [number for number, line in enumerate(screen.display) if line.strip()]
        for number in range(max(used, default=0) + 1):
            line = Text(no_wrap=True)
            cells = [screen.buffer[number][column] for column in range(screen.columns)]
            for style, group in itertools.groupby(cells, _style):
                line.append("".join(cell.data for cell in group), style)
            line.rstrip()
            console.print(line, soft_wrap=True)
        return console.export_svg(title=title, theme=SVG_EXPORT_THEME)


def _style(cell: Any) -> Style:
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
    terminal = open_terminal(command, columns, lines)
    try:
        for pattern, keys in steps:
            if not terminal.shows(partial(stands_in, pattern), timeout):
                sys.exit(f"no {pattern!r} in:\n{terminal.text()}")
            terminal.shows(lambda _: False, QUIET_S)
            terminal.type(codecs.decode(keys, "unicode_escape").encode())
        output.write_text(picture(terminal.screen, title), encoding="utf-8")
    finally:
        terminal.close()


if __name__ == "__main__":
    main()
