"""Commands whose standard streams are closed or full: one line or silence, and the exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import CLI, ELSEWHERE, Completed, environment
from support.variants import slow
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

CLOSED = "shmllm: standard output is closed"
FULL = "No space left on device"


def shmllm(redirections: str, *arguments: str) -> Completed:
    """Run a command with redirections of the shell."""
    shell = ["sh", "-c", f'exec "$@" {redirections}', "sh"]
    return subprocess.run(
        [*shell, sys.executable, "-c", CLI, *arguments],
        capture_output=True,
        env=environment(),
        cwd=ELSEWHERE,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirections", "arguments", "code", "message"),
    [
        (">&-", ["--version"], 2, CLOSED),
        (">&-", ["generate", "x"], 2, CLOSED),
        (">&-", ["generate", "x", "--json"], 2, CLOSED),
        ("<&- >&-", ["engine", "--help"], 2, CLOSED),
        ("<&-", ["generate", "-i", "-", "--json"], 2, "the input holds no prompt"),
        ("<&- >&- 2>&-", ["generate", "--help"], 2, ""),
        ("2>&-", ["generate", "--nonsense"], 2, ""),
        ("2>/dev/full", ["generate", "--nonsense"], 2, ""),
        (">/dev/full", ["--version"], 2, FULL),
        slow("<&-", ["generate"], 2, "standard input is empty"),
        slow("2>&-", ["--version"], 0, ""),
        slow("<&-", ["--version"], 0, ""),
        slow(">&-", ["top", "--once"], 2, "no engine of this user runs"),
        slow(">&-", ["bench", "ipc", "--help"], 2, CLOSED),
        slow(">/dev/full", ["engine", "ls", "--json"], 2, FULL),
    ],
)
def test_one_line_says_what_is_wrong(
    redirections: str, arguments: list[str], code: int, message: str
) -> None:
    done = shmllm(redirections, *arguments)
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("Usage")]
    assert done.returncode == code, lines
    assert len([line for line in lines if line and not line.startswith("Try ")]) == bool(message)
    assert message in "".join(lines)


@pytest.mark.slow
def test_a_full_stderr_does_not_cost_the_answer() -> None:
    done = shmllm("2>/dev/full", "generate", "x", "y", "--choice", "red")
    assert (done.returncode, done.stdout) == (0, b"red\n---\nred\n")


def test_a_command_that_needs_no_stream_runs_without_them(tmp_path: Path) -> None:
    """Were a number free, the output file would get it, and messages would go into the file."""
    path = tmp_path / "out.txt"
    done = shmllm("<&- >&- 2>&-", "generate", "x", "--choice", "red", "-o", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert path.read_text() == "red\n"
