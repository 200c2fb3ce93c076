"""Samples an engine's resident memory over time, from /proc and shared memory.

The sampler sends the engine no request. It therefore does not disturb the engine, and it also
works while the front end waits for the engine.
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
    """The members of `LLM` that `EngineWatch` uses."""

    @property
    def engine_pid(self) -> int: ...

    def is_sleeping(self) -> bool: ...


class EngineWatch:
    """Samples the engine in a thread while its `with` block runs.

    Args:
        llm: the LLM whose engine is sampled.
        period_s: seconds between two samples.

    Attributes:
        memory: (seconds since the block began, resident bytes), one pair per sample.
        asleep: half-open intervals, in the same seconds, in which the engine slept.
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
        """Seconds since the `with` block began."""
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
                is_asleep = self._llm.is_sleeping()
            except (OSError, ShmLLMError):
                return
            if pages == 0:  # the engine has ended, and its front end has not noticed yet
                return
            now = self.now
            if is_asleep:
                self._extend(self.memory[-1][0] if self.memory else now, now)
            self.memory.append((now, pages * _PAGE_BYTES))

    def _extend(self, since: float, now: float) -> None:
        """Adds the time between two samples to `asleep`; the engine slept at its end."""
        if self.asleep and self.asleep[-1][1] == since:
            since = self.asleep.pop()[0]
        self.asleep.append((since, now))
