"""A part of gpu_check: runs the tests marked gpu and counts their results.

Several processes test the kernels, because compiling takes most of the time. The other tests run in
one process, because some of them measure the memory of the whole device. Tests that exceed the time
get SIGINT, so that pytest still writes its report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.figures import Figures
from gpu.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tests/gpu")
KERNELS = TESTS / "kernels"
MOST_WORKERS = 8
RESERVE_S = 14.0
GRACE_S = 10.0  # pytest-xdist gives its processes five seconds to end
DEFAULT_S = 600.0
MESSAGE_CHARACTERS = 300
MOST_FAILURES = 40


def run(settings: Settings, figures: Figures) -> None:
    ends = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", DEFAULT_S)) - RESERVE_S
    groups = {
        "kernels": [str(KERNELS), *parallel_options(len(os.sched_getaffinity(0)))],
        "others": [str(TESTS), f"--ignore={KERNELS}"],
    }
    share = {"kernels": 0.6, "others": 1.0}
    failed, num_run = False, 0
    for name, arguments in groups.items():
        budget_s = max((ends - time.monotonic()) * share[name], 1.0)
        result = run_pytest(arguments, budget_s)
        figures.put(name, result)
        failed |= not result["finished"] or result["failed"] > 0
        num_run += result["passed"] + result["failed"]
    if failed:
        sys.exit("tests failed or did not finish: see the figures")
    if not num_run and not settings.rehearsal:
        sys.exit("all tests were skipped: torch sees no GPU")


def parallel_options(cores: int) -> list[str]:
    """Returns the options of pytest-xdist; none if it is not installed or there are few cores."""
    workers = min(MOST_WORKERS, cores // 2)
    if workers < 2 or find_spec("xdist") is None:
        return []
    return ["-p", "xdist.plugin", "-n", str(workers)]


def run_pytest(arguments: Sequence[str], budget_s: float) -> dict[str, Any]:
    """Runs pytest.

    Returns:
        passed, failed and skipped, the numbers of tests; finished, whether pytest ended within
        its time; failures, the name of each failed test and the first line of its message.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *arguments]
        # Other plugins on the machine may cause warnings, which are errors in these tests.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        finished = _wait(process, budget_s)
        counts = read_report(report)
    return {"finished": finished and process.returncode in (0, 1), **counts}


def read_report(path: Path) -> dict[str, Any]:
    """Reads the counts from a JUnit file; all are 0 if the file does not exist."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if not path.exists():
        return counts
    for suite in ET.parse(path).getroot().iter("testsuite"):
        # Count by the suite's attributes: an interrupted test is a case that looks as if passed.
        tests, failures, errors, skipped = (
            int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        )
        counts["passed"] += tests - failures - errors - skipped
        counts["failed"] += failures + errors
        counts["skipped"] += skipped
        for case in suite.iter("testcase"):
            problems = [*case.iter("failure"), *case.iter("error")]
            counts["failures"] += [_failure(case, problem) for problem in problems]
    counts["failures"] = counts["failures"][:MOST_FAILURES]
    return counts


def _failure(case: ET.Element, problem: ET.Element) -> dict[str, str]:
    message = (problem.get("message") or "").strip().partition("\n")[0]
    name = f"{case.get('classname')}::{case.get('name')}"
    return {"test": name, "message": message[:MESSAGE_CHARACTERS]}


def _wait(process: subprocess.Popen[bytes], budget_s: float) -> bool:
    """Waits for a process at most `budget_s`, then interrupts it; returns whether it ended within
    its time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(budget_s)
        return True
    for number in (signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            break
    return False
