"""A thread that runs jobs one after another, beside the thread that runs the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class BackgroundThread:
    """Runs jobs in the order in which they are submitted. The first job starts the thread,
    which ends after the last one when nothing refers to this object any more. The thread is a
    daemon, so that a long job does not keep the engine process from ending.

    Args:
        name: the thread's name.
        stack_bytes: the size of the thread's stack; 0 for the system's default.
    """

    def __init__(self, name: str, stack_bytes: int = 0) -> None:
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job. The future gets its result or its exception."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        if self._thread is None:
            self._start()
        return future

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_run, args=(self._jobs,), name=self._name, daemon=True
        )
        finalize(self, self._jobs.put, None).atexit = False
        before = threading.stack_size(self._stack_bytes)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)


def _run(jobs: _Jobs) -> None:
    """Run jobs until there is None in place of one."""
    while (entry := jobs.get()) is not None:
        future, job = entry
        try:
            future.set_result(job())
        except BaseException as error:  # a panic of a Rust library is not an Exception
            future.set_exception(error)
        del entry, future, job  # else this thread keeps them alive until the next job
