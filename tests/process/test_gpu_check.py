"""tools/gpu_check without a GPU: its parts run in processes, and --rehearse runs all parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SHAPE_PARTS = ("1b", "4b", "8b")

# Collects all children of its process, and so must not run in pytest's.
RUN_PARTS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpu.parts import Part
from gpu.running import Runner
parts, limit_s = json.loads(sys.argv[3]), float(sys.argv[4])
runner = Runner(limit_s, [], sys.stderr, lambda line: None, Path(sys.argv[2]), 1.0)
found = {name: runner.run(Part(name, "", budget, ""), os.environ) for name, budget in parts}
print(json.dumps(found))
"""
# Does what its part is called.
PROGRAM = """
import json, os, subprocess, sys, time
name, figures = sys.argv[2], sys.argv[4]
open(figures, "w").write(json.dumps({"half": 1, "seconds": os.environ["GPU_CHECK_SECONDS"]}))
if name == "fails":
    raise RuntimeError("out of tokens")
if name == "crashes":
    os.abort()
if name == "hangs":
    time.sleep(600)
if name == "leaves":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
print("done")
"""


def run_parts(tmp_path: Path, parts: list[tuple[str, float]], limit_s: float) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-c", RUN_PARTS, str(TOOLS), str(program), json.dumps(parts)]
    done = subprocess.run(
        [*command, str(limit_s)], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_part_that_fails_crashes_or_hangs_ends_no_other_part(tmp_path):
    names = [("works", 60.0), ("fails", 60.0), ("crashes", 60.0), ("hangs", 2.5), ("works2", 60.0)]
    found = run_parts(tmp_path, names, 100.0)
    assert {name: part["status"] for name, part in found.items()} == {
        "works": "ok",
        "fails": "failed",
        "crashes": "failed",
        "hangs": "timeout",
        "works2": "ok",
    }
    assert all(part["figures"]["half"] == 1 for part in found.values())
    assert found["fails"]["error"] == "RuntimeError: out of tokens (exit code 1)"
    assert "signal 6" in found["crashes"]["error"]
    assert found["works"]["error"] is None
    assert found["hangs"]["figures"]["seconds"] == "2.5"


def test_processes_that_a_part_leaves_behind_are_ended(tmp_path):
    found = run_parts(tmp_path, [("leaves", 60.0), ("works", 60.0)], 100.0)
    assert [part["status"] for part in found.values()] == ["ok", "ok"]
    assert found["leaves"]["error"] == "killed processes that outlived the part: 1"


def test_all_parts_together_keep_to_the_limit(tmp_path):
    found = run_parts(tmp_path, [("hangs", 60.0), ("works", 60.0)], 2.5)
    assert found["hangs"]["budget_s"] <= 2.5
    assert found["works"] == {
        "status": "skipped",
        "seconds": 0.0,
        "budget_s": 60.0,
        "error": "no time was left",
        "figures": {},
    }


def check(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "gpu_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_an_unknown_part_is_a_usage_error():
    done = check("--only", "nothing", "--out", "/nowhere", timeout=60)
    assert done.returncode == 2
    assert "no part 'nothing'; the parts are environment" in done.stderr


def test_an_engine_and_transformers_are_rehearsed_on_the_same_weights(tmp_path):
    parts = ("engine-1b", "transformers-1b")
    only = [word for part in parts for word in ("--only", part)]
    done = check("--rehearse", *only, "--out", str(tmp_path), timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert set(record["parts"]) == set(parts)
    ratios = record["derived"]["transformers"]["1b"]["eager"]
    assert {batch: found["agreed"] for batch, found in ratios.items()} == {"1": 1.0, "2": 1.0}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = check("--rehearse", "--out", str(tmp_path / "file" / "out"), timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: ")
    assert len(done.stderr.splitlines()) == 1


def test_wheels_from_nowhere_are_a_usage_error(tmp_path):
    done = check("--wheels", str(tmp_path / "x"), "--out", str(tmp_path), timeout=60)
    assert done.returncode == 2
    assert "no folder" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_part_that_runs(tmp_path, number, code):
    command = [sys.executable, str(TOOLS / "gpu_check"), "--rehearse", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert "environment: card" in process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.strip() == f"gpu_check: stopped; the completed parts are in {tmp_path}"
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)
    assert json.loads((tmp_path / "gpu-check.json").read_text())["parts"] == {}


@pytest.mark.slow
def test_the_rehearsal_takes_every_part(tmp_path):
    done = check("--rehearse", "--out", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert record["rehearsal"] is True
    assert {part["status"] for part in record["parts"].values()} == {"ok"}
    # All that is asked was measured, if only as a rehearsal; the tests are skipped.
    unknown = [target["name"] for target in record["targets"] if target["measured"] is None]
    assert unknown == ["GPU tests that fail"]
    assert {target["ok"] for target in record["targets"]} == {None}
    for size in SHAPE_PARTS:
        found = record["derived"]["transformers"][size]["eager"]
        assert {ratios["agreed"] for ratios in found.values()} == {1.0}
    assert len(record["parts"]["ablations"]["figures"]["arms"]) == 4
    text = (tmp_path / "gpu-check.md").read_text()
    assert "no GPU figures" in text.splitlines()[0]


@pytest.mark.slow
def test_tuning_is_rehearsed(tmp_path):
    done = check("--rehearse", "--tune", "--out", str(tmp_path), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    figures = record["parts"]["tune"]["figures"]
    assert set(figures["entries"]) == {"decode 16", "prefill 16"}
    assert all(entry["gain"] >= 1 for entry in figures["entries"].values())
    assert '"any": {16: (16, ' in figures["python"]
