"""How an engine process comes to its end: by a signal, by an operator, or with its front end.

This module owns the phase of the process. It must not know what the process does meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType

from shmllm.ipc.control import ControlPage


class Phase(Enum):
    """
    RUNNING   -> DRAINING   an operator stops the engine with time to drain; no new requests
    RUNNING   -> STOPPING   a first signal, or the private engine's front end has ended
    DRAINING  -> STOPPING   all requests have ended, or the time is over
    STOPPING                running requests are aborted and the process ends
    """

    RUNNING = auto()
    DRAINING = auto()
    STOPPING = auto()


class Ending:
    """Handles SIGTERM and SIGINT from now on: the first one stops the engine, the second one ends
    the process at once.

    Args:
        page: the control page, on which an operator asks for the end.
        wake: wakes the engine's loop, which may be parked.
        withdraw: takes the engine's name back.
    """

    def __init__(
        self, page: ControlPage, wake: Callable[[], None], withdraw: Callable[[], None]
    ) -> None:
        self._page = page
        self._wake = wake
        self._withdraw = withdraw
        self._phase = Phase.RUNNING
        self._stop_request: float | None = None
        self._drain_deadline = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop_by_signal)

    @property
    def is_running(self) -> bool:
        """Whether the engine takes new requests."""
        return self._phase is Phase.RUNNING

    @property
    def is_draining(self) -> bool:
        """Whether the engine ends with its last request."""
        return self._phase is Phase.DRAINING

    @property
    def is_stopping(self) -> bool:
        """Whether the engine ends now."""
        return self._phase is Phase.STOPPING

    def stop(self) -> None:
        """End now."""
        self._phase = Phase.STOPPING

    def obey_operator(self) -> None:
        """Stop if `shmllm engine stop` asks for it. A later request can shorten the drain."""
        drain_s = self._page.stop_request()
        if drain_s == self._stop_request or self.is_stopping:
            return
        self._stop_request = drain_s
        if drain_s is not None:
            self._drain_deadline = time.monotonic() + drain_s
            self._phase = Phase.DRAINING if drain_s > 0 else Phase.STOPPING

    def end_drain(self, now: float) -> None:
        """Stop if the time to drain is over. `now` is the value of time.monotonic()."""
        if self.is_draining and now >= self._drain_deadline:
            self.stop()

    def _stop_by_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.is_stopping:
            self._withdraw()
            os._exit(128 + number)
        self.stop()
        self._wake()
