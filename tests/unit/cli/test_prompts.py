"""The sources of a command's text prompts."""

from __future__ import annotations

import io

import click
import pytest

from shmllm.batch.sources import LineInput
from shmllm.cli.prompts import InputPrompt, as_chat, read_prompts


@pytest.fixture
def read(tmp_path):
    """A function that reads the prompts of a file with the given content."""

    def read_content(content):
        path = tmp_path / "prompts.txt"
        path.write_bytes(content)
        return read_prompts((), LineInput(str(path)))

    return read_content


class Stdin(io.StringIO):
    def __init__(self, text, is_terminal):
        super().__init__(text)
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def test_arguments_are_prompts():
    found = read_prompts(("a", "{ b"))
    assert found == [InputPrompt("a", "prompt 1"), InputPrompt("{ b", "prompt 2")]


def test_a_pipe_is_one_prompt_of_all_lines(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("one\ntwo\n", False))
    assert read_prompts(()) == [InputPrompt("one\ntwo\n", "standard input")]


def test_arguments_have_priority_over_a_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("piped", False))
    assert read_prompts(("a",))[0].content == "a"


def test_the_error_without_a_prompt_shows_an_example(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("", True))
    with pytest.raises(click.UsageError, match="no prompt; try: shmllm generate"):
        read_prompts(())


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\t\n"])
def test_an_input_without_a_prompt_is_refused(read, content):
    with pytest.raises(click.UsageError, match="holds no prompt"):
        read(content)


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\n  \nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"  indented  \n", ["  indented  "]),
        (b"[1, 2]\n", ["[1, 2]"]),
        ("né\n".encode(), ["né"]),
    ],
    ids=repr,
)
def test_lines_are_prompts(read, content, prompts):
    assert [item.content for item in read(content)] == prompts


def test_origins_hold_the_line_number_and_the_file(read, tmp_path):
    origins = [item.origin.replace(str(tmp_path), "") for item in read(b"a\n\nb\n")]
    assert origins == ["line 1 of /prompts.txt", "line 3 of /prompts.txt"]


def test_lines_that_are_not_utf_8_are_refused(read):
    with pytest.raises(click.UsageError, match="is not UTF-8"):
        read(b"good\nbad \xff\n")


USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("system", "messages"),
    [
        (None, [USER]),
        ("be brief", [SYSTEM, USER]),
        ("", [{"role": "system", "content": ""}, USER]),
    ],
)
def test_chat_turns_a_prompt_into_messages(system, messages):
    found = as_chat(InputPrompt("hi", "line 1 of x"), system)
    assert found == InputPrompt(messages, "line 1 of x")
