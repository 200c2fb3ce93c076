"""The lines for the shell in the documents: their commands, options and files exist."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from shmllm.cli.main import cli

REPOSITORY = Path(__file__).resolve().parents[3]
SEPARATORS = ("|", "&&", ">", "&")
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def lines() -> list[str]:
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                for _, command in itertools.groupby(words, lambda word: word in SEPARATORS):
                    found.append(shlex.join(command))
    return sorted({line for line in found if line.startswith("shmllm ")})


@pytest.mark.parametrize("line", lines())
def test_a_line_for_the_shell_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    command: click.Command = cli
    name, *arguments = shlex.split(line)
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        name = arguments.pop(0)
        command = command.commands[name]
    assert not isinstance(command, click.Group), line
    command.make_context(name, arguments)


def test_files_of_the_examples_that_the_readme_names_exist() -> None:
    named = re.findall(r"\bexamples/[\w.]+", DOCUMENTS[0].read_text())
    assert "examples/questions.jsonl" in named
    assert all((REPOSITORY / name).is_file() for name in named)
