"""Makes Ctrl-C end an answer, and nothing else of a chat."""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any, Self


class AnswerStopped(KeyboardInterrupt):
    """Ctrl-C while an answer was awaited or written."""


class StopKey:
    """Raises AnswerStopped on SIGINT while it is armed, once; ignores SIGINT otherwise.

    It has this effect inside of its `with` block only. Where SIGINT is ignored, as in a background
    job, it stays ignored.

    Attributes:
        armed: set it inside of the `try` that catches AnswerStopped.
    """

    def __init__(self) -> None:
        self.armed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    def _stop(self, number: int, frame: Any) -> None:
        if self.armed:
            self.armed = False  # a second one must not end what the first one began
            raise AnswerStopped
