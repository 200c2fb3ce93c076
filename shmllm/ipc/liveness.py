"""Whether a process is there: by pidfd, which no other process can inherit the number of."""

from __future__ import annotations

import os
import select

from shmllm.ipc.segment import pid_namespace


def open_pidfd(pid: int, namespace: int) -> int | None:
    """A descriptor that becomes readable when the process ends.

    Whoever relies on it has to see, after opening it, that the process still owns its
    segment: until then the pid may have been given to another one.

    Returns:
        None if `pid` counts in another namespace or is gone.
    """
    if namespace != pid_namespace():
        return None
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None


def wait_for_end(pidfd: int, timeout_s: float) -> bool:
    """Whether the process has ended, after waiting for that at most `timeout_s`. A closed
    descriptor (-1) is that of a process whose end was seen.

    A poll object for each call: one cannot be used by two threads at once.
    """
    if pidfd < 0:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0) * 1000))
