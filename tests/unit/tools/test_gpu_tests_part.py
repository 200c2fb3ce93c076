"""The part that runs tests, on tests that do what is expected of them."""

from __future__ import annotations

import pytest
from gpu.tests_part import parallel_options, read_report, run_pytest

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
def test_counts_and_failures_survive_the_end_of_the_time(tmp_path, seconds):
    path = tmp_path / "test_all.py"
    path.write_text(TESTS.replace("SECONDS", str(seconds)))
    found = run_pytest([str(path)], 60.0 if seconds == 0 else 3.0)
    assert found["finished"] is (seconds == 0)
    assert (found["failed"], found["skipped"]) == (2, 1)
    assert found["passed"] == (2 if seconds == 0 else 1)
    [fails, errs] = found["failures"]
    assert fails["test"].endswith("test_all::test_fails")
    assert "not equal" in fails["message"]
    assert "no fixture" in errs["message"]


def test_no_report_counts_nothing(tmp_path):
    counts = read_report(tmp_path / "none.xml")
    assert counts == {"passed": 0, "failed": 0, "skipped": 0, "failures": []}


def test_few_cores_run_one_process():
    assert parallel_options(3) == []
    assert parallel_options(16)[-1] == "8"
