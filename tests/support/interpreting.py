"""Runs folders of tests in processes of their own, in which Triton interprets kernels.

Triton decides at its import whether it compiles or interprets kernels, so no process can do both,
and the process of the other tests must compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOME_FAILED = 1
NO_TESTS_COLLECTED = 5
LIMIT_S = 3600

Completed = subprocess.CompletedProcess[str]


def files(folder: Path) -> list[str]:
    """Return the names of the test files in a folder."""
    return sorted(path.name for path in folder.glob("test_*.py"))


def check_interpreted(folder: Path, name: str, markers: str) -> None:
    """Check that the tests of a file that have these markers pass, interpreted.

    The first call runs the whole folder, because starting a process for each file would take
    longer than many of the tests.
    """
    done = _run_interpreted(folder, markers)
    if done.returncode == SOME_FAILED:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        assert failed, done.stdout + done.stderr
        assert not any(f"/{name}" in line for line in failed), done.stdout + done.stderr
    else:
        assert done.returncode in (0, NO_TESTS_COLLECTED), done.stdout + done.stderr


def assert_nothing_is_collected_compiled(*folders: Path) -> None:
    """Check that pytest collects no test of the folders where Triton compiles."""
    done = _pytest(*map(str, folders), "--collect-only")
    assert done.returncode == NO_TESTS_COLLECTED, done.stdout


@cache
def _run_interpreted(folder: Path, markers: str) -> Completed:
    return _pytest(str(folder), "-m", markers, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def _pytest(*arguments: str, **variables: str) -> Completed:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=kept | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
