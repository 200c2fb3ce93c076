"""Waits that end: until a condition holds, until threads have ended.

PATIENCE_S is far more than anything here takes, also on a machine that does other things: a test
that reaches it has found something that does not happen, not something that is slow.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

PATIENCE_S = 60.0
LOOK_EVERY_S = 0.01


def _sleep() -> None:
    time.sleep(LOOK_EVERY_S)


def holds_within(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether a condition comes true before `limit_s` are over."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        _sleep()
    return True


def wait_until(
    condition: Callable[[], bool], what: str, between: Callable[[], Any] = _sleep
) -> None:
    """Wait for a condition.

    Args:
        condition: called until it is true.
        what: what is waited for, in words.
        between: called after each look that found it false; waits a moment.

    Raises:
        AssertionError: it is still false after PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        between()


async def wait_until_async(condition: Callable[[], bool], what: str) -> None:
    """As `wait_until`, in a coroutine."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        await asyncio.sleep(LOOK_EVERY_S)


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads to end."""
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} has not ended within {PATIENCE_S:.0f} s"
