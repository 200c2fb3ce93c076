"""What a chat writes to a terminal, and what to a file."""

from __future__ import annotations

import io

import pytest

from shmllm.cli.chat.screen import Screen, visible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_control_characters_can_be_seen_and_do_nothing() -> None:
    assert visible("a\x1b[2Jb\x07\r\x7f\x9b1m\x00") == "a^[[2Jb^G^M^?\ufffd1m^@"
    assert visible("é\t\n漢 \U0001f600") == "é\t\n漢 \U0001f600"


@pytest.mark.parametrize(("out", "written"), [(Terminal(), "^[[0m"), (io.StringIO(), "\x1b[0m")])
def test_a_file_gets_the_text_as_it_is(out: io.StringIO, written: str) -> None:
    Screen(out, io.StringIO()).write("\x1b[0m")
    assert out.getvalue() == written


@pytest.mark.parametrize("text", ["one", "one\n"])
def test_a_line_is_ended_once(text: str) -> None:
    out = io.StringIO()
    screen = Screen(out, io.StringIO())
    for piece in (text, "", ""):
        screen.write(piece)
    screen.end_line()
    screen.end_line()
    assert out.getvalue() == "one\n"


def test_remarks_are_dimmed_on_a_terminal_with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(Terminal()) == "\x1b[2mx\x1b[0m\n"
    assert noted(io.StringIO()) == "x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert noted(Terminal()) == "x\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert noted(Terminal()) == "x\n"


def noted(notes: io.StringIO) -> str:
    Screen(io.StringIO(), notes).note("x")
    return notes.getvalue()


def test_a_complaint_is_one_line() -> None:
    notes = io.StringIO()
    Screen(io.StringIO(), notes).complain("two\nlines \x1b")
    assert notes.getvalue() == "shmllm: two lines ^[\n"


def test_reasoning_is_dimmed_on_lines_of_its_own_and_goes_to_the_remarks() -> None:
    screen = Screen(out := io.StringIO(), notes := Terminal())
    for text, is_reasoning in [("a", True), ("b\n", True), ("c", True), ("", False), ("d", False)]:
        screen.write(text, is_reasoning)
    screen.end_line()
    screen.write("e", True)
    screen.end_line()
    dimmed = [f"\x1b[2m{text}\x1b[0m" for text in ("a", "b\n", "c", "\n", "e", "\n")]
    assert notes.getvalue() == "".join(dimmed)
    assert out.getvalue() == "d\n"
