"""Starts the engines and ranks of this process by fork from a process that has imported torch.

The import takes most of an engine's start. Everything else is as after exec: the same module runs
with the same arguments, environment and descriptors, in a child process of this one, in a session
of its own. What differs: all engines of a test session have one seed of hashes, and share the pages
that hold the imported modules. So tests of the start, of signals, of memory and of what engines
must agree on use exec.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support import fork_server

from shmllm.config import processes
from shmllm.config.environment import engine_environment

READ_LATER = ("COLUMNS", "PYTEST_", "SHMLLM_", "TOKENIZERS_")
"""Beginnings of the names of variables that an engine reads after its imports, or never."""

SPACE_FOR_COMMAND = "-" * 50_000
PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A child process, with what callers use of `subprocess.Popen`.

    Attributes:
        pid: its pid.
        returncode: as that of `Popen`.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """See `Popen.poll`, as for the following."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """`support.fork_server` in a process, which ends with this one."""

    def __init__(self) -> None:
        self.environment = engine_environment()
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = Path(fork_server.__file__).read_text(encoding="utf-8")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", source, str(theirs.fileno()), SPACE_FOR_COMMAND],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=self.environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._connection.close()
        self._process.wait()

    def start(self, command: Sequence[str], descriptors: dict[int, int]) -> ForkedProcess:
        """Start an engine.

        Args:
            command: python -m MODULE ARGUMENTS.
            descriptors: the numbers of its descriptors, and the files of this process for them.
        """
        request = {
            "command": command,
            "module": command[2],
            "arguments": command[3:],
            "environment": engine_environment(),
            "numbers": list(descriptors),
        }
        with self._lock, self._as_subreaper():
            data = [json.dumps(request).encode()]
            socket.send_fds(self._connection, data, list(descriptors.values()))
            return ForkedProcess(int(self._connection.recv(20)))

    @contextmanager
    def _as_subreaper(self) -> Iterator[None]:
        """A process that its parent leaves behind becomes a child of this process meanwhile."""
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            self._libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@cache
def _server() -> ForkServer:
    return ForkServer()


def _read_at_start(environment: dict[str, str]) -> dict[str, str | list[str]]:
    """What a new interpreter and the imports of an engine may read, with the paths in PYTHONPATH
    that it would not search otherwise."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    searched = {"", sysconfig.get_paths()["purelib"]}
    found = {k: v for k, v in environment.items() if not k.startswith(READ_LATER)}
    return found | {"PYTHONPATH": [path for path in dict.fromkeys(paths) if path not in searched]}


def _popen(command: Sequence[str], **options: Any) -> Any:
    """Fork what runs a module in the environment that the server has, and execute all else."""
    is_module = list(command[:2]) == [sys.executable, "-m"]
    if not is_module or _read_at_start(options["env"]) != _read_at_start(_server().environment):
        return subprocess.Popen(command, **options)
    with open(os.devnull, "r+b") as null:
        outputs = {1: options["stdout"], 2: options["stderr"]}
        files = {
            number: null if output == subprocess.DEVNULL else number if output is None else output
            for number, output in outputs.items()
        }
        descriptors = {0: null, **files, **{fd: fd for fd in options["pass_fds"]}}
        numbers = {
            number: file if isinstance(file, int) else file.fileno()
            for number, file in descriptors.items()
        }
        return _server().start(list(command), numbers)


@contextmanager
def forked_engines() -> Iterator[None]:
    """Meanwhile `config.processes.start` forks engines and ranks."""
    with patch.object(processes, "Popen", _popen):
        yield
