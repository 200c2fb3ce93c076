"""Runs a small case of attention under NVIDIA's compute-sanitizer, if the machine has it.

It finds accesses out of bounds and misaligned ones, which neither a comparison of results nor
Triton's interpreter shows. This module must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME = "compute-sanitizer"
PLACES = (Path("/usr/local/cuda/bin"), Path("/usr/local/cuda/compute-sanitizer"))
ERROR_EXIT = 86
SUMMARY = "ERROR SUMMARY: "
MOST_LINES = 20
LEAST_S = 1.0


def find() -> str | None:
    """Returns the path of compute-sanitizer: the machine's own, or the one in a carried wheel."""
    if found := shutil.which(NAME):
        return found
    carried = (file for path in sys.path for file in Path(path).glob(f"nvidia/*/bin/{NAME}"))
    files = (*(place / NAME for place in PLACES), *carried)
    return next((str(file) for file in files if file.is_file()), None)


class Sanitizer:
    """A process that runs one case under compute-sanitizer, beside this one. A context manager.

    Args:
        rehearsal: whether there is no GPU.
    """

    def __init__(self, rehearsal: bool) -> None:
        self._options = ["--rehearse"] if rehearsal else []
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sanitizer:
        return self

    def __exit__(self, *details: object) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()

    def start(self) -> None:
        """Starts the process, if the machine has compute-sanitizer."""
        if (program := find()) is None:
            return
        command = [program, "--tool", "memcheck", "--error-exitcode", str(ERROR_EXIT)]
        # Between two allocations of torch's cache there are no gaps that could show an error.
        variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "gpu.sanitized_case", *self._options],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the process.

        Returns:
            status: "clean", "not carried", "did not run" if compute-sanitizer cannot work on this
            machine, or "not done in time"; and the last lines of its output.

        Raises:
            RuntimeError: compute-sanitizer found an error.
        """
        if self._process is None:
            return {"status": "not carried"}
        try:
            code = self._process.wait(max(timeout_s, LEAST_S))
        except subprocess.TimeoutExpired:
            return {"status": "not done in time", "output": self._lines()[-MOST_LINES:]}
        lines = self._lines()
        summary = next((line for line in reversed(lines) if SUMMARY in line), "")
        if code == 0 and f"{SUMMARY}0 errors" in summary:
            return {"status": "clean", "output": [summary]}
        if code == ERROR_EXIT and any("Invalid __" in line for line in lines):
            print("\n".join(lines))
            first = next(line for line in lines if "Invalid __" in line)
            raise RuntimeError(f"compute-sanitizer found an error: {first.strip('= ')}")
        return {"status": "did not run", "exit_code": code, "output": lines[-MOST_LINES:]}

    def _lines(self) -> list[str]:
        self._output.seek(0)
        return [line.rstrip() for line in self._output if line.strip()]
