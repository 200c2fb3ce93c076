"""Starts the engine process and knows how it ended.

The engine is started by exec, in a session of its own: it needs no `__main__` guard in
the caller's script, no signal of the caller's terminal reaches it, and nothing that the
caller initialised (threads, CUDA) is inherited. It gets the descriptors of its two
segments and of the front end's pidfd, and nothing else.
"""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from shmllm.config.engine import EngineConfig
from shmllm.ipc.liveness import wait_for_end
from shmllm.ipc.segment import above_standard_streams

ENGINE_MODULE = "shmllm.engine"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# How often a compute thread looks for its next piece of work before it sleeps. OpenMP's own
# default spins for milliseconds: where anything else needs the core, every operator of a
# step then waits for a thread that was pushed off it (measured: docs/benchmarks.md).
SPIN_COUNT = "4000"
# Large blocks in huge pages: packing the weights of a 135 M model anew spends 8 instead of 56 ms
# in page faults.
MALLOC_TUNABLES = "glibc.malloc.hugetlb=1"


def _import_paths() -> list[str]:
    """Directories the caller imports shmllm from that a fresh interpreter would not search."""
    found = {sysconfig.get_paths()["purelib"], *site.getsitepackages(), site.getusersitepackages()}
    package = Path(__file__).resolve().parents[1]
    roots = [str(package.parent)]
    if (package.parent / "kernels" / "shmllm_kernels").is_dir():
        roots.append(str(package.parent / "kernels"))
    return [root for root in roots if root not in found]


def engine_environment() -> dict[str, str]:
    """The caller's environment, less the thread counts that a launcher meant for others, and
    with a short spin for idle compute threads unless the caller says how they wait."""
    environment = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    if not environment.keys() & set(WAITING_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
    environment.setdefault("GLIBC_TUNABLES", MALLOC_TUNABLES)
    return import_environment(environment)


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a Python program finds shmllm where this one has it from."""
    paths = [*_import_paths(), *filter(None, [environment.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**environment, **found}


def named_engine_command(name: str, config: EngineConfig) -> list[str]:
    """Arguments to exec a named engine with; run it in `engine_environment` and in /."""
    return [sys.executable, "-m", ENGINE_MODULE, "--named", name, config.to_json()]


def _output() -> int:
    """Where the engine's stdout and stderr go: to the caller's stderr, if that is open."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


class EngineHandle:
    """A started engine process.

    Args:
        segment_fds: descriptors of the control and the client segment, in that order.
    """

    def __init__(self, segment_fds: Sequence[int]) -> None:
        own_pidfd = above_standard_streams(os.pidfd_open(os.getpid()))
        output = _output()
        try:
            arguments = [str(fd) for fd in (*segment_fds, own_pidfd)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", ENGINE_MODULE, "--private", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=engine_environment(),
                pass_fds=(*segment_fds, own_pidfd),
                start_new_session=True,
            )
        finally:
            os.close(own_pidfd)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended, after waiting for that at most `timeout_s`."""
        return wait_for_end(self._pidfd, timeout_s)

    def exit_status(self) -> tuple[int | None, int | None]:
        """(exit code, signal) of the ended process, both None where the status got lost:
        a caller that ignores SIGCHLD has the kernel throw it away."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None, None
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            return None, None
        return (None, -code) if code < 0 else (code, None)

    def stop(self, grace_s: float) -> None:
        """Wait for the end; ask for it by SIGTERM after `grace_s`, then insist by SIGKILL."""
        if self._pidfd < 0:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(grace_s):
                break
            signal.pidfd_send_signal(self._pidfd, number)
        self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
