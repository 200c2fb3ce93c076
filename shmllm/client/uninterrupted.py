"""Calls that no exception of a signal handler ends.

Python runs signal handlers in the main thread only, so a function that another thread runs is not
interrupted.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GRACE_S = 1.0
"""The time for which an interrupted caller waits for the end of the function, in seconds."""


def call_uninterrupted(function: Callable[[], T], grace_s: float = GRACE_S) -> T:
    """Call a function, and return its result. An exception of a signal handler does not end the
    function in the middle.

    Such an exception ends this call after the function's end, after `grace_s` seconds, or when
    another one comes.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    results: list[T] = []
    errors: list[BaseException] = []
    ended: list[bool] = []
    is_done = threading.Lock()
    is_done.acquire()

    def run() -> None:
        try:
            results.append(function())
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
    return results[0]
