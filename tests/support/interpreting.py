"""Runs test files in processes of their own, in which Triton interprets kernels.

Triton decides at its import whether it compiles or interprets kernels, so no process can do both,
and the process of the other tests must compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
NO_TESTS_COLLECTED = 5


def files(folder: Path) -> list[str]:
    """Return the names of the test files in a folder."""
    return sorted(path.name for path in folder.glob("test_*.py"))


def interpret(path: Path, markers: str) -> None:
    """Run the tests of a file that have these markers, interpreted."""
    done = _pytest(path, "-m", markers, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode in (0, NO_TESTS_COLLECTED), done.stdout + done.stderr


def assert_nothing_is_collected_compiled(folder: Path) -> None:
    """Check that pytest collects no test of the folder where Triton compiles."""
    done = _pytest(folder, "--collect-only")
    assert done.returncode == NO_TESTS_COLLECTED, done.stdout


def _pytest(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [*command, *arguments, str(path)],
        cwd=REPOSITORY,
        env=kept | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
