"""Where outputs of one request wait for the coroutine that wants them.

There is no queue: what changed is noted, and an output is made of it when it is taken. So
a slow consumer finds one output that holds all that came meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
from contextlib import AbstractContextManager

from shmllm.frontend.emitted import next_outputs
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.request import RequestOutput


class RequestOutputQueue:
    """Made in the event loop whose coroutine takes.

    Attributes:
        index: its number among all mailboxes; -1 before the request was submitted.
        states: of the request's completions.
        changed: those of them with something to take. Guarded by the dispatcher's `reading`.
        is_told: the coroutine was woken and has not looked yet.
        error: raised in the coroutine.
    """

    __slots__ = ("changed", "error", "event", "index", "is_told", "loop", "states")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.index = -1
        self.states: list[RequestState] = []
        self.changed: dict[int, RequestState] = {}
        self.is_told = False
        self.error: BaseException | None = None

    def running(self) -> list[int]:
        """Numbers of the completions that have not ended."""
        return [state.number for state in self.states if state.finish_reason is None]

    async def take(self, reading: AbstractContextManager[None]) -> RequestOutput | None:
        """Wait for a change; the output that shows it, None if there is nothing to show yet.

        Args:
            reading: guards the states.

        Raises:
            RequestError: the request was refused.
            EngineDeadError: the engine died.
        """
        await self.event.wait()
        self.event.clear()
        with reading:
            self.is_told = False
            changed = list(self.changed.values())
            self.changed.clear()
            for state in changed:
                state.raise_error()
            outputs = next_outputs(changed)
        if self.error is not None and not outputs:
            raise copy.copy(self.error)
        return outputs[0] if outputs else None
