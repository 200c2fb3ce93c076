"""Controls a variant's pair of processes from the process that compares the variants.

This module owns starting, commanding and ending the pair, and the directory for its files. It must
not know the meaning of the figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from array import array
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from shmllm.bench.variants import Variant
from shmllm.bench.worker import Command
from shmllm.errors import IpcError, IpcTimeoutError

WORKER_MODULE = "shmllm.bench.worker"
START_S = 60.0
RUN_S = 300.0
END_S = 10.0


class Pair:
    """Two processes that run the commands of one variant. Call `close` at the end.

    Args:
        variant: the variant to run.
        is_pinned: whether each process stays on one CPU.
    """

    def __init__(self, variant: Variant, is_pinned: bool) -> None:
        self.variant = variant
        self._directory = tempfile.TemporaryDirectory(prefix="shmllm-bench-")
        self._errors = open(Path(self._directory.name) / "stderr", "w+b")  # noqa: SIM115
        ours, theirs = Pipe()
        self._connection: Connection[Any, Any] = ours
        own_pidfd = os.pidfd_open(os.getpid())
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", WORKER_MODULE, variant.name, self._directory.name),
                    *map(str, (theirs.fileno(), own_pidfd, int(is_pinned))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                cwd=self._directory.name,
                env=_environment(),
                pass_fds=(theirs.fileno(), own_pidfd),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(own_pidfd)

    def wait_ready(self) -> None:
        """Waits until both processes are ready for commands.

        Raises:
            IpcError: the pair did not start; the message holds the last line of its stderr.
        """
        self._receive(START_S)

    def run(self, command: Command) -> tuple[array[int], int]:
        """Runs a command.

        Returns:
            Durations in nanoseconds, and the CPU time of both processes in nanoseconds.

        Raises:
            IpcError: the pair died or did not answer in time.
        """
        self._connection.send_bytes(json.dumps(asdict(command)).encode())
        report = self._receive(RUN_S)
        durations = array("q")
        durations.frombytes(report[8:])
        return durations, int.from_bytes(report[:8], "little")

    def close(self) -> None:
        """Ends both processes, by SIGKILL after a timeout, and removes their files; idempotent."""
        self._connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()
        if self.variant.package == "iceoryx2":
            import_module("shmllm.bench.iceoryx_transport").remove_leftovers(self._directory.name)
        self._directory.cleanup()

    def _receive(self, limit_s: float) -> bytes:
        try:
            if not self._connection.poll(limit_s):
                raise IpcTimeoutError(f"{self.variant.name}: no answer within {limit_s:.0f} s")
            return self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise IpcError(f"{self.variant.name}: {self._last_error()}") from None

    def _last_error(self) -> str:
        """The last line of the pair's stderr, or its exit code."""
        self._process.wait(END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended ({self._process.returncode})"


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
