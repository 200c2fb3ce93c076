"""How a pool changes an adapter at all engines or at none, beside other front ends.

Each engine holds what it has of the adapter until all have answered. Only one front end at a time
holds an adapter, so the front end waits for another one that changes the same adapter. This module
must not know what a change is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.pool_work import outcome_of
from shmllm.client.uninterrupted import call_uninterrupted
from shmllm.errors import RequestError
from shmllm.wire.messages import Method

WAIT_S = 10.0
"""How long the front end waits for another one, in seconds."""
RETRY_S = 0.05
"""The longest time between two attempts. It is random, so that two front ends whose pools have
their engines in different orders do not meet again and again."""
RELEASE_S = 10.0
"""How long an interrupt waits until all engines hold the adapter no more, in seconds."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engines(Protocol):
    """The methods of `EnginePool` that are used here."""

    def each(self, use: Callable[[ChannelEngineClient], T]) -> Iterator[tuple[int, T]]: ...

    def collect(self) -> None: ...


def change_adapter(
    engines: Engines, number: Any, hold: Callable[[], bool], change: Callable[[], T]
) -> T:
    """Change an adapter at all engines. If one refuses, or at an interrupt, all restore what they
    have had.

    Args:
        engines: the pool.
        number: the adapter's.
        hold: lets all engines hold the adapter; False if one cannot, because another front end
            holds it there.
        change: makes the change at all engines.

    Raises:
        RequestError: other front ends have held the adapter for WAIT_S seconds.
    """
    restore = False
    try:
        _wait_for_others(engines, number, hold)
        restore = True
        answer = change()
        restore = False
        return answer
    finally:
        call_uninterrupted(lambda: _release(engines, restore), RELEASE_S)


def _wait_for_others(engines: Engines, number: Any, hold: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not hold():
        _release(engines, False)  # the other front end may wait for the engines that hold it
        if time.monotonic() > deadline_s:
            raise RequestError(
                f"another front end has been changing adapter {number} for {WAIT_S:g} s: try again "
                "when it has ended"
            )
        engines.collect()
        time.sleep(random.uniform(0, RETRY_S))


def _release(engines: Engines, restore: bool) -> None:
    for _, outcome in engines.each(
        lambda client: outcome_of(lambda: client.call(Method.RELEASE_LORA, restore))
    ):
        if outcome.error is not None:
            logger.warning("an engine of the pool keeps an adapter: %s", outcome.error)
