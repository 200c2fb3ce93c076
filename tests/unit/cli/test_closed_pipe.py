"""Commands whose reader has closed stdout, as `head` does."""

from __future__ import annotations

import os

import pytest
from support.commands import command


def ended(*arguments: str) -> tuple[int, bytes]:
    """The exit code and stderr of a command that writes to a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(*arguments, output=writer)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments", [("models", "tiny"), ("models", "tiny", "--json"), ("--help",), ("kv", "--help")]
)
def test_a_closed_pipe_ends_a_command_without_an_error(arguments: tuple[str, ...]) -> None:
    assert ended(*arguments) == (0, b"")


def test_an_error_of_a_command_stays_one() -> None:
    code, message = ended("models", "/nowhere")
    assert code == 2
    assert b"no model '/nowhere'" in message


def test_another_pipe_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise BrokenPipeError("another one")

    monkeypatch.setattr("shmllm.cli.models.takes", fail)
    done = command("models", "tiny", "--json")
    assert (done.returncode, done.stderr) == (2, b"shmllm: another one\n")
