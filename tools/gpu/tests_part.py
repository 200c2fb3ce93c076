"""Parts of gpu_check: run a shard of the tests marked gpu, and count its results.

Each shard fits into a command of ten minutes. Several processes share the tests of a shard whose
time is that of the compiler; tests that measure the memory of the whole device run in one process.
Tests that exceed the time get SIGINT, so that pytest still writes its report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.figures import Figures
from gpu.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "tests/gpu/kernels"
STEPS = tuple(
    f"tests/gpu/worker/test_{name}.py" for name in ("program", "persistent", "inputs", "sampler")
)


@dataclass(frozen=True)
class Shard:
    """A share of the tests.

    Attributes:
        what: a description.
        arguments: the arguments of pytest that choose the tests.
        is_parallel: whether several processes run them.
    """

    what: str
    arguments: tuple[str, ...]
    is_parallel: bool = True


SHARDS = {
    "attention": Shard("the attention kernels", (KERNELS, "-k", "TestAttention")),
    "kernels": Shard("all other kernels", (KERNELS, "-k", "not TestAttention")),
    "steps": Shard("a model's steps, their inputs and their sampling", STEPS),
    "others": Shard(
        "memory, graphs and whole engines",
        ("tests/gpu", *(f"--ignore={path}" for path in (KERNELS, *STEPS))),
        is_parallel=False,
    ),
}
MOST_WORKERS = 12
RESERVE_S = 14.0
GRACE_S = 10.0  # pytest-xdist gives its processes five seconds to end
DEFAULT_S = 600.0
MESSAGE_CHARACTERS = 300
MOST_FAILURES = 40


def run(settings: Settings, figures: Figures, shard: str) -> None:
    if find_spec("llvmlite") is None:
        sys.exit("llvmlite is missing, which the tests need for the CPU's engine")
    budget_s = float(os.environ.get("GPU_CHECK_SECONDS", DEFAULT_S)) - RESERVE_S
    options = parallel_options(len(os.sched_getaffinity(0))) if SHARDS[shard].is_parallel else []
    result = run_pytest([*SHARDS[shard].arguments, *options], max(budget_s, 1.0))
    figures.put("tests", result)
    if result["failed"]:
        first = result["failures"][0]
        sys.exit(f"{result['failed']} tests failed, the first: {first['test']}: {first['message']}")
    if not result["finished"]:
        sys.exit("the tests did not finish: see the log")
    if not result["passed"] and not settings.rehearsal:
        sys.exit("no test ran: torch sees no GPU")


def parallel_options(cores: int) -> list[str]:
    """Returns the options of pytest-xdist; none if it is not installed or there are few cores."""
    workers = min(MOST_WORKERS, cores - 2)
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
