"""Starts engine processes, and reports how they ended.

`config.processes` starts it by exec, so the caller's script needs no `__main__` guard. A private
engine inherits the descriptors of its segments and of the front end's pidfd, and no others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from shmllm.config import processes
from shmllm.config.engine import EngineConfig
from shmllm.ipc.liveness import wait_for_end
from shmllm.ipc.segment import above_standard_streams

ENGINE_MODULE = "shmllm.engine"


def named_engine_command(name: str, config: EngineConfig) -> list[str]:
    """The command that starts a named engine. It has to run in / with `engine_environment`."""
    return [sys.executable, "-m", ENGINE_MODULE, "--named", name, config.to_json()]


def _output() -> int:
    """The descriptor for the engine's stdout and stderr: the caller's stderr, if that is open."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


class ChildEngineHandle:
    """Starts a private engine, and is the `EngineHandle` of its process.

    Args:
        segment_fds: the descriptors of the control segment and of the client segment.
        bell_fds: that of the segment whose doorbell wakes the front end, if it is another one.
    """

    def __init__(self, segment_fds: Sequence[int], bell_fds: Sequence[int] = ()) -> None:
        own_pidfd = above_standard_streams(os.pidfd_open(os.getpid()))
        output = _output()
        try:
            inherited = (*segment_fds, own_pidfd, *bell_fds)
            command = [sys.executable, "-m", ENGINE_MODULE, "--private", *map(str, inherited)]
            self._process = processes.start(command, output, inherited)
        finally:
            os.close(own_pidfd)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the end. Returns whether the process has ended."""
        return wait_for_end(self._pidfd, timeout_s)

    def exit_status(self) -> tuple[int | None, int | None]:
        """The (exit code, signal) of the ended process. Both are None if the status is lost: the
        kernel drops it if this process ignores SIGCHLD."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None, None
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            return None, None
        return (None, -code) if code < 0 else (code, None)

    def stop(self, grace_s: float) -> None:
        """Wait for the end of the process. After `grace_s` seconds send SIGTERM, and after
        another `grace_s` seconds SIGKILL."""
        if self._pidfd < 0:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(grace_s):
                break
            signal.pidfd_send_signal(self._pidfd, number)
        self._process.wait()
        pidfd, self._pidfd = self._pidfd, -1
        os.close(pidfd)
