"""The formal models of the transport are correct, and deliberately broken ones are rejected."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / "tools" / "model" / "check"
LIMIT_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.process]


MODELS = sorted(
    path.stem for path in CHECK.parent.glob("*.pml") if path.stem not in ("tso", "weak")
)


@pytest.mark.parametrize("model", MODELS)
def test_correct_models_pass_and_broken_ones_fail(model: str) -> None:
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {' and '.join(missing)} (apt-get install spin gcc)")
    done = subprocess.run(
        [sys.executable, CHECK, model],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as expected" in done.stdout


def test_missing_spin_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CHECK],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={"PATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "spin is missing: apt-get install spin (Debian, Ubuntu)\n"
