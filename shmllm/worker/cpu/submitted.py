"""Steps of a CPU that were submitted: run when their results are wanted, or on a thread.

The thread takes one after the other, so a step finds on it what the step before left. Owns the
one thing that the thread has to wait for: constraints follow the tokens of the step before, and
those are given to them on the engine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from shmllm.core.plan import StepPlan, StepResult
from shmllm.worker.background import Background

Execute = Callable[[StepPlan], StepResult]


class DeferredStep:
    """Runs in `result`."""

    def __init__(self, execute: Execute, plan: StepPlan) -> None:
        self._execute = execute
        self._plan = plan

    def release(self) -> None:
        """It has not begun yet."""

    def result(self) -> StepResult:
        """Run it."""
        return self._execute(self._plan)


class ThreadedStep:
    """Runs on `thread`, after those that were submitted before."""

    def __init__(self, execute: Execute, plan: StepPlan, thread: Background) -> None:
        self._released: threading.Event | None = threading.Event() if plan.constraints else None
        self._execute = execute
        self._plan = plan
        self._future: Future[StepResult] = thread.submit(self._run)

    def release(self) -> None:
        """The constraints have the tokens of the step before."""
        if self._released is not None:
            self._released.set()

    def result(self) -> StepResult:
        """Wait for it."""
        return self._future.result()

    def _run(self) -> StepResult:
        if self._released is not None:
            self._released.wait()
        # Its moments lie beside those of the engine's thread.
        return replace(self._execute(self._plan), computing_ns=None)
