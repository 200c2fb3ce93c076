"""Runs parts, each in a process of its own, one after the other, within their time.

Owns processes and time. A part that fails, crashes or hangs costs its own figures only: a
broken CUDA context, an engine that does not answer, and memory that was not freed end with its
process. Knows nothing of what is measured.
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
    """
    Args:
        limit_s: for all parts together.
        options: of `program`, for all parts.
        log: gets what they print.
        report: called with a line when a part begins and when it ends.
        program: runs one part in its process: `program ... --only PART --here FIGURES`.
        patience_s: with processes that a part left behind.
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
        """Run a part with these environment variables, if there is time left.

        Returns:
            status ("ok", "failed", "timeout" or "skipped"), seconds, budget_s, error, which
            is also a note if processes had to be ended that it left behind, and figures, those
            too that were measured before it failed.
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
        """Status and error."""
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
            return "failed", _last_words(text, process.returncode)
        return "ok", f"ended what it left behind: {killed}" if killed else ""


def _is_late(process: subprocess.Popen[bytes], budget_s: float) -> bool:
    """Wait for it; whether it had to be ended, which it also is if this process is stopped."""
    try:
        process.wait(budget_s)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its group, if it still runs."""
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


def _last_words(text: str, code: int) -> str:
    """The last line that says something: of a traceback, what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    said = next((line for line in reversed(lines[-LAST_LINES:]) if ": " in line), "")
    return f"{said or (lines[-1] if lines else 'no output')} ({how})"[:500]
