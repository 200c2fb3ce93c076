"""Handles on processes that are no children of ours."""

from __future__ import annotations

import os

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
