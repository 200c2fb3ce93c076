"""Sleeping so that waking up takes no core from whoever computes there.

A thread that wakes preempts, in Linux, the one that runs on its core; and a step whose
threads wait for each other is as slow as the one that was preempted. Under SCHED_BATCH it
waits for a free core, or for the end of a time slice. That policy can be taken and left
without privileges, unlike a nice value, which nobody may lower again; so it is taken for the
sleep alone, and what a caller's thread does before and after is as it was. (A niced thread of
a process would also keep the others waiting for the interpreter's lock.)

Must not know what is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_NO_PRIORITY = os.sched_param(0)


def sleep_politely(sleep: Callable[[float], bool], timeout_s: float) -> bool:
    """Call `sleep(timeout_s)` so that its end preempts nobody."""
    try:
        is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)
    except OSError:  # a sandbox forbids it
        is_usual = False
    try:
        return sleep(timeout_s)
    finally:
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_OTHER, _NO_PRIORITY)
