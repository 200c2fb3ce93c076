"""Part: the tests marked gpu, and what they said.

Kernels are tested by several processes, because compiling them takes most of the time; what
looks at the memory of the whole device runs alone. Tests that are not done in time are ended
as by Ctrl-C: then pytest still says what it knows.
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
GRACE_S = 10.0  # pytest-xdist gives its processes five to end
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
        sys.exit("tests failed or were not done: see the figures")
    if not num_run and not settings.rehearsal:
        sys.exit("all tests were skipped: torch sees no GPU")


def parallel_options(cores: int) -> list[str]:
    """For pytest-xdist, where it is there and pays."""
    workers = min(MOST_WORKERS, cores // 2)
    if workers < 2 or find_spec("xdist") is None:
        return []
    return ["-p", "xdist.plugin", "-n", str(workers)]


def run_pytest(arguments: Sequence[str], budget_s: float) -> dict[str, Any]:
    """Counts; finished: whether it ended by itself; failures: of each that failed, the test and
    the first line of why."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *arguments]
        # Other plugins of the machine may warn, and warnings are errors.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        finished = _wait(process, budget_s)
        counts = read_report(report)
    return {"finished": finished and process.returncode in (0, 1), **counts}


def read_report(path: Path) -> dict[str, Any]:
    """Of a JUnit file; all counts are 0 if there is none."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if not path.exists():
        return counts
    for suite in ET.parse(path).getroot().iter("testsuite"):
        # Tests that were interrupted are cases as well, and look like those that passed.
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
    """Whether it ended by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(budget_s)
        return True
    for number in (signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            break
    return False
