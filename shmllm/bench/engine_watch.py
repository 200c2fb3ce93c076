"""An engine's memory over time, seen from outside: from /proc and shared memory.

Owns the sampling. The engine is asked nothing, so what it does is not disturbed, and it can
be watched while its front end waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from shmllm.errors import ShmLLMError

PERIOD_S = 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watched(Protocol):
    """What is needed of an LLM."""

    @property
    def engine_pid(self) -> int: ...

    def get_metrics(self) -> dict[str, int]: ...


class EngineWatch:
    """Samples within a `with` block, in a thread of its own.

    Args:
        llm: whose engine is watched.
        period_s: between two samples.

    Attributes:
        memory: (seconds since the block began, resident bytes) of each sample.
        asleep: half-open intervals of these seconds in which it slept.
    """

    def __init__(self, llm: Watched, period_s: float = PERIOD_S) -> None:
        self._llm = llm
        self._period_s = period_s
        self._statm = Path(f"/proc/{llm.engine_pid}/statm")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shmllm-watch", daemon=True)
        self._began = time.monotonic()
        self.memory: list[tuple[float, int]] = []
        self.asleep: list[tuple[float, float]] = []

    @property
    def now(self) -> float:
        """Seconds since the block began."""
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._period_s):
            try:
                pages = int(self._statm.read_bytes().split()[1])
                is_asleep = bool(self._llm.get_metrics().get("asleep"))
            except (OSError, ShmLLMError):
                return
            if pages == 0:  # it has ended, and its front end does not know yet
                return
            now = self.now
            if is_asleep:
                self._extend(self.memory[-1][0] if self.memory else now, now)
            self.memory.append((now, pages * _PAGE_BYTES))

    def _extend(self, since: float, now: float) -> None:
        """The time from the last sample to this one was slept, at least at its end."""
        if self.asleep and self.asleep[-1][1] == since:
            since = self.asleep.pop()[0]
        self.asleep.append((since, now))
