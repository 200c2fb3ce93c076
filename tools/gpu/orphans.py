"""Processes that a part left behind, an engine that hangs above all: found and ended.

The kernel gives them to this process when their parent is gone, if it was asked to: then they
are known by number, and no name has to be looked for.
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
    """To be called once. Without it, where the kernel has no such thing, they stay."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(patience_s: float) -> int:
    """Wait for all children of this process, none of which may be wanted any more; end those
    that do not end by themselves. Returns how many had to be ended."""
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
    """Pids of this process' children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold anything.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.append(int(entry.name))
    return found


def _reap() -> bool:
    """Collect those that ended; whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
