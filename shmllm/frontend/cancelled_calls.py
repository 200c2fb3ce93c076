"""Calls that coroutines make in other threads, and that end soon after a cancellation.

A thread cannot be ended, so a function that takes long looks with `Cancellation.check` whether its
caller is still there. This module must not know what the functions do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import TypeVar

Result = TypeVar("Result")


class Cancellation:
    """Whether the coroutine that made a call was cancelled.

    Attributes:
        is_requested: it was; the call's result is of no use.
    """

    __slots__ = ("is_requested",)

    def __init__(self) -> None:
        self.is_requested = False

    def check(self) -> None:
        """Raise CancelledError if the coroutine was cancelled."""
        if self.is_requested:
            raise CancelledError


_OF_THIS_CALL: ContextVar[Cancellation | None] = ContextVar("_OF_THIS_CALL", default=None)


def cancellation_of_this_call() -> Cancellation:
    """The cancellation of the call in progress; nobody requests it if no coroutine called."""
    return _OF_THIS_CALL.get() or Cancellation()


async def call_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in another thread, as `asyncio.to_thread`.

    A cancelled coroutine does not wait for the function, which learns it from
    `cancellation_of_this_call`.
    """
    cancellation = Cancellation()

    def call() -> Result:
        _OF_THIS_CALL.set(cancellation)  # in the copy of the context that this thread has
        return function()

    try:
        return await asyncio.to_thread(call)
    except asyncio.CancelledError:
        cancellation.is_requested = True
        raise
