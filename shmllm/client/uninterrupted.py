"""Calls that no exception of a signal handler ends.

Python runs signal handlers in the main thread only, so a function that another thread runs is not
interrupted.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

GRACE_S = 1.0
"""The time for which an interrupted caller waits for the end of the function, in seconds."""


def call_uninterrupted(function: Callable[[], None], grace_s: float = GRACE_S) -> None:
    """Call a function so that an exception of a signal handler does not end it in the middle.

    Such an exception ends this call after the function's end, after `grace_s` seconds, or when
    another one comes.
    """
    if threading.current_thread() is not threading.main_thread():
        function()
        return
    errors: list[BaseException] = []
    ended: list[bool] = []
    is_done = threading.Lock()
    is_done.acquire()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.append(True)
            is_done.release()

    try:
        _thread.start_new_thread(run, ())
        is_done.acquire()
    except BaseException:
        if not ended:  # else the call above may have acquired the lock already
            is_done.acquire(timeout=grace_s)
        raise
    if errors:
        raise errors[0]
