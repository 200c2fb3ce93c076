"""The part that runs the GPU tests, on tests that pass, fail, are skipped or take too long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from gpu.tests_part import ROOT, SHARDS, parallel_options, read_report, run_pytest
from support.waiting import PATIENCE_S

TESTS = """
import time
import pytest

pytestmark = pytest.mark.gpu

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "not equal"

@pytest.mark.skip
def test_is_skipped():
    pass

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

def test_errs(broken):
    pass

class TestLast:
    def test_lasts(self):
        time.sleep(SECONDS)
"""


@pytest.mark.process
@pytest.mark.parametrize("seconds", [0, 600])
def test_counts_and_failures_are_reported_also_if_the_time_is_over(tmp_path, seconds):
    path = tmp_path / "test_all.py"
    path.write_text(TESTS.replace("SECONDS", str(seconds)))
    for limit_s in (3.0, 15.0, 75.0):  # the start of pytest alone may take longer on a busy machine
        found = run_pytest([str(path)], PATIENCE_S if seconds == 0 else limit_s)
        if found["failures"]:
            break
    assert found["finished"] is (seconds == 0)
    assert (found["failed"], found["skipped"]) == (2, 1)
    assert found["passed"] == (2 if seconds == 0 else 1)
    [fails, errs] = found["failures"]
    assert fails["test"].endswith("test_all::test_fails")
    assert "not equal" in fails["message"]
    assert "no fixture" in errs["message"]


def test_without_a_report_all_counts_are_zero(tmp_path):
    counts = read_report(tmp_path / "none.xml")
    assert counts == {"passed": 0, "failed": 0, "skipped": 0, "failures": []}


def test_with_few_cores_one_process_runs_the_tests():
    assert parallel_options(3) == []
    assert parallel_options(16)[-1] == "12"


@pytest.mark.slow
@pytest.mark.process
def test_each_gpu_test_is_in_exactly_one_shard():
    every = collected(["tests/gpu"])
    shards = [collected(shard.arguments) for shard in SHARDS.values()]
    assert len(every) > 400
    assert sorted(test for shard in shards for test in shard) == sorted(every)


def collected(arguments: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", *arguments]
    done = subprocess.run([*command, "-n", "0"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]
