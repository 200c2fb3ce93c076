"""Pausing an engine from a front end: the steps of it, for whoever waits between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shmllm.frontend.dispatcher import Dispatcher
from shmllm.wire.messages import Method

PauseMode = Literal["abort", "wait", "keep"]


def pause(dispatcher: Dispatcher, mode: PauseMode, clear_cache: bool) -> Iterator[None]:
    """Pause; yields as often as it has to be waited for requests to end."""
    while dispatcher.call(Method.PAUSE, mode) and mode == "wait":
        yield
    if clear_cache:
        dispatcher.call(Method.RESET_PREFIX_CACHE, mode == "keep")


def resume(dispatcher: Dispatcher) -> bool:
    """End this front end's pause. Returns whether the engine goes on."""
    return bool(dispatcher.call(Method.RESUME))
