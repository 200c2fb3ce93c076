"""Runs the tests of the Triton kernels, each file in a process of its own that interprets.

Triton decides at its import whether kernels are compiled or interpreted, so no process can do
both, and none of the engine's tests may have it interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
REPOSITORY = Path(__file__).resolve().parents[3]
NO_TESTS_COLLECTED = 5


def interpret(path: Path, markers: str) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", markers, str(path)],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, NO_TESTS_COLLECTED), done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(name: str) -> None:
    interpret(FOLDER / name, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted_at_length(name: str) -> None:
    interpret(FOLDER / name, "slow")


def test_none_of_them_is_collected_where_triton_compiles() -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "-n", "0", str(FOLDER)],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == NO_TESTS_COLLECTED, done.stdout
