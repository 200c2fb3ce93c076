"""A thread that runs jobs beside the steps, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Starts with the first job. A daemon: a long job must not keep the engine from ending.

    Args:
        name: of the thread.
        stack_bytes: 0 for what the system gives.
    """

    def __init__(self, name: str, stack_bytes: int = 0) -> None:
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its result or exception is the future's."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        if self._thread is None:
            self._start()
        return future

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        before = threading.stack_size(self._stack_bytes)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # a panic of a compiled library is no Exception
                future.set_exception(error)
            del future, job  # nothing of the last job lives on while this waits
