"""Runs the parts one after the other, each in its own process and within its time budget.

A part that fails, crashes or hangs does not affect the others: a broken CUDA context, an engine
that does not answer, and memory that was not freed end with its process. This module must not know
what the parts measure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu.figures import read_figures
from gpu.orphans import PATIENCE_S, adopt_orphans, end_orphans
from gpu.parts import Part

CHECK = Path(__file__).resolve().parents[1] / "gpu_check"
LEAST_S = 2.0
GRACE_S = 5.0
LAST_LINES = 12

Report = Callable[[str], None]


class Runner:
    """Runs parts in processes.

    Args:
        limit_s: the time of all parts together.
        options: options of `program` for all parts.
        log: the file that gets the output of the parts.
        report: called with a line when a part begins and when it ends.
        program: the command that runs one part: `program ... --only PART --here FIGURES`.
        patience_s: the time until processes that outlive a part are killed.
    """

    def __init__(
        self,
        limit_s: float,
        options: Sequence[str],
        log: TextIO,
        report: Report,
        program: Path = CHECK,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._ends = time.monotonic() + limit_s
        self._options = list(options)
        self._log = log
        self._report = report
        self._program = program
        self._patience_s = patience_s
        adopt_orphans()

    def run(self, part: Part, environment: Mapping[str, str]) -> dict[str, Any]:
        """Runs a part with these environment variables, unless the time is over.

        Returns:
            status ("ok", "failed", "timeout" or "skipped"), seconds, budget_s, error and figures.
            error is a note, with status "ok", if processes that outlived the part were killed.
            figures includes those measured before the part failed.
        """
        budget_s = min(part.budget_s, self._ends - time.monotonic())
        if budget_s < LEAST_S:
            self._report(f"{part.name}: skipped, no time is left")
            return _outcome("skipped", 0.0, part.budget_s, "no time was left", {})
        self._report(f"{part.name}: {part.what} (at most {budget_s:.0f} s)")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
            path = Path(directory) / "figures.json"
            own = {"TMPDIR": directory, "GPU_CHECK_SECONDS": f"{budget_s:.1f}"}
            status, error = self._supervise(part, path, {**environment, **own}, budget_s)
            figures = read_figures(path)
        seconds = time.monotonic() - began
        self._report(f"{part.name}: {status} after {seconds:.1f} s" + (error and f": {error}"))
        return _outcome(status, seconds, budget_s, error, figures)

    def _supervise(
        self, part: Part, figures: Path, environment: Mapping[str, str], budget_s: float
    ) -> tuple[str, str]:
        """Runs the part's process; returns status and error."""
        output = figures.with_name("output")
        command = [sys.executable, str(self._program), *self._options]
        command += ["--only", part.name, "--here", str(figures)]
        with output.open("w+", errors="replace") as out:
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                is_late = _is_late(process, budget_s)
            finally:
                killed = end_orphans(self._patience_s)
        text = output.read_text(errors="replace")
        self._log.write(f"===== {part.name}\n{text}\n")
        self._log.flush()
        if is_late:
            return "timeout", f"not done after {budget_s:.0f} s"
        if process.returncode:
            return "failed", _error_line(text, process.returncode)
        return "ok", f"killed processes that outlived the part: {killed}" if killed else ""


def _is_late(process: subprocess.Popen[bytes], budget_s: float) -> bool:
    """Waits for a process at most `budget_s` and then stops it; returns whether it was late. The
    process is also stopped if this one is interrupted."""
    try:
        process.wait(budget_s)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stops a process and its process group, if it still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _outcome(
    status: str, seconds: float, budget_s: float, error: str, figures: dict[str, Any]
) -> dict[str, Any]:
    return {
        "status": status,
        "seconds": round(seconds, 1),
        "budget_s": round(budget_s, 1),
        "error": error or None,
        "figures": figures,
    }


def _error_line(text: str, code: int) -> str:
    """Returns the line of the output that most likely names the error: the last one with ": ",
    which in a traceback is the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    message = next((line for line in reversed(lines[-LAST_LINES:]) if ": " in line), "")
    return f"{message or (lines[-1] if lines else 'no output')} ({how})"[:500]
