"""What a line of a chat means."""

from __future__ import annotations

import pytest

from shmllm.cli.chat.commands import Command, Line, help_lines, parse
from shmllm.errors import RequestError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", Line(None, "hello")),
        ("  indented\n  lines", Line(None, "  indented\n  lines")),
        ("a / b", Line(None, "a / b")),
        ("//usr/bin", Line(None, "/usr/bin")),
        ("/system Be brief.", Line(Command.SYSTEM, "Be brief.")),
        ("/system", Line(Command.SYSTEM, "")),
        (" /reset ", Line(Command.RESET, "")),
        ("/save my file.json", Line(Command.SAVE, "my file.json")),
        ("/save! x", Line(Command.REPLACE, "x")),
        ("/", Line(Command.HELP, "")),
        ("/bye", Line(Command.EXIT, "")),
    ],
)
def test_a_line_is_a_message_or_a_command(text: str, expected: Line) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/sytem x", "unknown command /sytem; did you mean /system"),
        ("/usr/bin/env", "// begins a message"),
        ("/reset now", "/reset takes nothing after it"),
        ("/save", "/save needs the name of a file"),
    ],
)
def test_what_is_no_command_says_what_to_type(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        parse(text)


def test_help_has_a_line_for_each_command_in_80_columns() -> None:
    lines = help_lines()
    assert all(any(line.startswith(f"/{each.word}") for line in lines) for each in Command)
    assert max(map(len, lines)) <= 80


def test_image_takes_a_file_or_nothing() -> None:
    assert parse("/image my cat.png") == Line(Command.IMAGE, "my cat.png")
    assert parse("/image") == Line(Command.IMAGE, "")
    with pytest.raises(RequestError, match="/detach takes nothing after it"):
        parse("/detach cat.png")
