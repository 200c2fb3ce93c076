"""RequestOutputQueue: passes the outputs of one request from the poll thread to a coroutine.

The queue contains the states that changed, not outputs: `take` makes an output from them. So a
slow consumer gets one output with everything that arrived since the last one.
"""

from __future__ import annotations

import asyncio
import copy
from contextlib import AbstractContextManager

from shmllm.frontend.request_outputs import join_completions, next_output
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.request import RequestOutput


class RequestOutputQueue:
    """The outputs of one request. Construct it in the event loop of the consuming coroutine.

    Attributes:
        loop: that event loop.
        event: set when the consumer should look at `changed`; only `loop` sets and clears it.
        index: the number of this queue in its poll thread; -1 before the request is submitted.
        states: the states of the request's completions.
        changed: the states that changed since the last `take`, by number. Guarded by the
            dispatcher's `reading`.
        is_notified: whether the consumer was woken and has not looked at `changed` since.
        error: the exception that `take` raises after the last output, or None.
    """

    __slots__ = ("changed", "error", "event", "index", "is_notified", "loop", "states")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.index = -1
        self.states: list[RequestState] = []
        self.changed: dict[int, RequestState] = {}
        self.is_notified = False
        self.error: BaseException | None = None

    def running(self) -> list[int]:
        """The numbers of the completions that have not ended."""
        return [state.number for state in self.states if state.finish_reason is None]

    async def take(self, reading: AbstractContextManager[None]) -> RequestOutput | None:
        """Wait until states have changed, and return the next output.

        Args:
            reading: the dispatcher's context manager in which the states do not change.

        Returns:
            None if the change makes no output due yet.

        Raises:
            RequestError: the request was refused.
            EngineDeadError: the engine process ended.
        """
        await self.event.wait()
        self.event.clear()
        with reading:
            self.is_notified = False
            changed = list(self.changed.values())
            self.changed.clear()
            for state in changed:
                state.raise_error()
            outputs = join_completions(map(next_output, changed))
        if self.error is not None and not outputs:
            raise copy.copy(self.error)
        return outputs[0] if outputs else None
