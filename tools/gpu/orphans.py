"""Finds and kills processes that outlive a part, such as an engine that hangs.

This process becomes their parent when their own parent ends (child subreaper), so it finds them
among its children instead of by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # sys/prctl.h
PATIENCE_S = 5.0


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants. On a kernel without this feature the
    orphans are not found."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(patience_s: float) -> int:
    """Waits for all children of this process, and kills those that run after `patience_s`.

    The caller must not need any child any more.

    Returns:
        The number of processes that were killed.
    """
    deadline = time.monotonic() + patience_s
    while _reap():
        if time.monotonic() < deadline:
            time.sleep(0.05)
            continue
        remaining = children()
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in remaining:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return len(remaining)
    return 0


def children() -> list[int]:
    """Returns the pids of this process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The process name, in parentheses, may contain spaces and parentheses.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.append(int(entry.name))
    return found


def _reap() -> bool:
    """Reaps the children that have ended; returns whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
