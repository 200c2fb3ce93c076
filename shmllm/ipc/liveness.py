"""Checks whether a process is alive, with pidfds, and whether it is stopped.

A pidfd always refers to the process that it was opened for, while the kernel may give the pid of an
ended process to another one.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from shmllm.ipc.segment import pid_namespace


def open_pidfd(pid: int, namespace: int) -> int | None:
    """Open a descriptor that becomes readable when a process ends.

    After this call the caller must check that the process still owns its segment, because the
    kernel may have given the pid to another process before the call.

    Args:
        pid: the pid of the process in its own pid namespace.
        namespace: the inode of that namespace.

    Returns:
        None if the process has another pid namespace than this one, or has ended.
    """
    if namespace != pid_namespace():
        return None
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None


def wait_for_end(pidfd: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for the end of a process.

    Args:
        pidfd: from `open_pidfd`; -1 means that the process is known to have ended.
        timeout_s: the longest wait.

    Returns:
        Whether the process has ended.
    """
    if pidfd < 0:
        return True
    # Two threads cannot use one poll object at the same time, so each call creates its own.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0) * 1000))


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped a process of this pid
    namespace. False if it does not exist."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"
