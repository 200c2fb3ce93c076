"""Runs the parts one after the other, each in its own process and within its time budget.

A part that fails, crashes or hangs does not affect this process: a broken CUDA context, an engine
that does not answer, and memory that was not freed end with the part's process. This module must
not know what the parts measure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu.figures import OUT_OF_TIME, read_figures, write_json
from gpu.orphans import PATIENCE_S, adopt_orphans, end_orphans
from gpu.parts import Part

CHECK = Path(__file__).resolve().parents[1] / "gpu_check"
GRACE_S = 5.0
LAST_LINES = 12
SHOWN_LINES = 30
LINE_CHARACTERS = 200
PARENT = "GPU_CHECK_PID"
"""The environment variable with the pid of the process that runs the parts."""


class Runner:
    """Runs parts in processes.

    Args:
        options: options of `program` for all parts.
        log: the file that gets the output of the parts.
        figures: the file that has the figures of the running part.
        directory: the folder of the parts' temporary files, as an absolute path.
        program: the command that runs one part: `program ... --only PART --here FIGURES`.
        patience_s: the time until processes that outlive a part are killed.
    """

    def __init__(
        self,
        options: Sequence[str],
        log: TextIO,
        figures: Path,
        directory: Path,
        program: Path = CHECK,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._options = list(options)
        self._log = log
        self._figures = figures
        self._directory = directory
        self._program = program
        self._patience_s = patience_s
        adopt_orphans()

    def run(
        self,
        part: Part,
        environment: Mapping[str, str],
        budget_s: float,
        earlier: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Runs a part.

        Args:
            part: the part.
            environment: the environment variables of its process.
            budget_s: the time after which it is stopped.
            earlier: the figures of an earlier run of the part that ran out of time.

        Returns:
            status ("ok", "failed", "timeout" or "unfinished"), seconds, budget_s, error, output and
            figures. error is a note, with status "ok", if processes that outlived the part were
            killed. output has the last lines that the part wrote, unless its status is "ok".
            figures includes those measured before the part failed.
        """
        began = time.monotonic()
        write_json(self._figures, dict(earlier or {}))
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            own = {"TMPDIR": directory, "GPU_CHECK_SECONDS": f"{budget_s:.1f}"}
            own[PARENT] = str(os.getpid())
            status, error, text = self._supervise(part, Path(directory), {**environment, **own})
            figures = read_figures(self._figures)
        self._figures.unlink()
        return {
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
            "budget_s": round(budget_s, 1),
            "error": error or None,
            "output": [] if status == "ok" else _last_lines(text, SHOWN_LINES),
            "figures": figures,
        }

    def _supervise(
        self, part: Part, directory: Path, environment: Mapping[str, str]
    ) -> tuple[str, str, str]:
        """Runs the part's process; returns status, error and output."""
        budget_s = float(environment["GPU_CHECK_SECONDS"])
        output = directory / "output"
        command = [sys.executable, str(self._program), *self._options]
        command += ["--only", part.name, "--here", str(self._figures)]
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
            return "timeout", f"not done after {budget_s:.0f} s", text
        if process.returncode == OUT_OF_TIME:
            return "unfinished", "", text
        if process.returncode:
            return "failed", _error_line(text, process.returncode), text
        note = f"killed processes that outlived the part: {killed}" if killed else ""
        return "ok", note, text


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


def _last_lines(text: str, count: int) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line[:LINE_CHARACTERS] for line in lines[-count:]]


def _error_line(text: str, code: int) -> str:
    """Returns the line of the output that most likely names the error: the last one with ": ",
    which in a traceback is the exception."""
    lines = [line.strip() for line in _last_lines(text, LAST_LINES)]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    message = next((line for line in reversed(lines) if ": " in line), "")
    return f"{message or (lines[-1] if lines else 'no output')} ({how})"[:500]
