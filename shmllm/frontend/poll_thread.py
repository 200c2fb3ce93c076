"""PollThread: the thread that submits, polls and aborts the requests of an AsyncLLM.

The event loop never waits for the engine: coroutines put commands into the thread's queue, and the
thread wakes the event loop when a RequestOutputQueue has something to take. This module must not
know what coroutines do with outputs.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from shmllm.errors import RequestError, ShmLLMError
from shmllm.frontend.dispatcher import POLL_S
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_output_queue import RequestOutputQueue
from shmllm.frontend.request_state import RequestState
from shmllm.params.sampling import RequestOutputKind

Result = TypeVar("Result")

COMMANDS_PER_POLL = 32
"""The largest number of commands to execute between two polls."""
STOP_S = 5.0
"""The time for which `stop` waits for the thread to end, in seconds."""


class PollThread:
    """A thread that runs commands and polls the engine. It starts with the first command.

    Args:
        front_end: the front end of the engine. No other thread should poll through it.

    Attributes:
        error: the exception that ended the thread; None while the thread can run commands.
    """

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._dispatcher = front_end.dispatcher
        self._group = RequestGroup()
        self._queues: dict[int, RequestOutputQueue] = {}
        self._next_index = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def submit(
        self,
        output_queue: RequestOutputQueue,
        prepare: Callable[[], PreparedRequest],
        request_id: str,
    ) -> None:
        """Prepare and send a request in the thread.

        Args:
            output_queue: receives the outputs of the request, or its RequestError.
            prepare: checks and tokenizes the prompt; the thread calls it.
            request_id: the id in the outputs.

        Raises:
            BaseException: a copy of `error`, if the thread has ended.
        """
        self._put(lambda: self._submit(output_queue, prepare, request_id))

    def abort(self, output_queue: RequestOutputQueue) -> None:
        """Abort a request. Its last output has the finish_reason "abort"."""
        self._put(lambda: self._dispatcher.abort(output_queue.running()))

    def discard(self, output_queue: RequestOutputQueue) -> None:
        """Abort a request and drop its outputs."""
        self._put(lambda: self._discard(output_queue))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function in the thread, unless the future is cancelled before. The future gets its
        result or its exception, after the consumers of all outputs that have arrived until then
        were woken."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
                self._deliver(self._dispatcher.collect(self._group, 0))
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)

        self._put(run)
        return future

    def stop(self) -> None:
        """End the thread. Consumers of unfinished requests get an error. Idempotent."""
        self._is_stopping = True
        with self._start:
            thread = self._thread
        if thread is None:
            self.error = self.error or _shut_down_error()
        elif thread is not threading.current_thread():
            self._wake_up(lambda: None)
            thread.join(STOP_S)

    def check_alive(self) -> None:
        """Raise a copy of `error` if the thread has ended.

        Raises:
            ShmLLMError: the thread belongs to the process that forked this one.
        """
        if self.error is not None:
            raise copy.copy(self.error)
        if self._thread is not None and not self._thread.is_alive() and self.error is None:
            raise ShmLLMError("this AsyncLLM belongs to the process that forked this one")

    def _put(self, command: Callable[[], None]) -> None:
        self.check_alive()
        with self._start:
            if self._thread is None and not self._is_stopping:
                thread = threading.Thread(target=self._run, name="shmllm", daemon=True)
                thread.start()
                # After `start`, so that a thread that is not alive is one that has ended.
                self._thread = thread
        self._wake_up(command)
        self.check_alive()  # the thread may have ended without executing this command

    def _wake_up(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._front_end.client.wake()

    def _run(self) -> None:
        # An exception may end the caller of `start` before it stores the thread, and then the next
        # command may start another one.
        with self._start:
            self._thread = self._thread or threading.current_thread()
        if self._thread is not threading.current_thread():
            return
        try:
            while not self._is_stopping:
                self._work()
            raise _shut_down_error()
        except BaseException as error:
            self.error = error
        for output_queue in list(self._queues.values()):
            output_queue.error = self.error
        self._notify(self._queues.values())

    def _work(self) -> None:
        """Execute the queued commands, then poll the engine. Without open requests, wait for a
        command instead."""
        if not self._group.num_open:
            self._commands.get()()
        for _ in range(COMMANDS_PER_POLL):
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
        if self._group.num_open:
            is_idle = self._commands.empty()
            self._deliver(self._dispatcher.collect(self._group, POLL_S if is_idle else 0))

    def _submit(
        self,
        output_queue: RequestOutputQueue,
        prepare: Callable[[], PreparedRequest],
        request_id: str,
    ) -> None:
        index = output_queue.index = self._next_index
        self._next_index += 1
        self._queues[index] = output_queue
        try:
            request = prepare()
        except RequestError as error:
            output_queue.error = error
            self._notify([self._queues.pop(index)])
            return
        streaming = request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        output_queue.states = self._dispatcher.submit(
            self._group, request, index, streaming=streaming, request_id=request_id
        )

    def _discard(self, output_queue: RequestOutputQueue) -> None:
        if self._queues.pop(output_queue.index, None) is not None:
            self._dispatcher.discard(self._group, output_queue.states)

    def _deliver(self, changed: list[RequestState]) -> None:
        output_queues = []
        with self._dispatcher.reading():
            for state in changed:
                if (output_queue := self._queues.get(state.index)) is not None:
                    output_queue.changed[state.number] = state
                    output_queues.append(output_queue)
            for state in changed:
                if state.ends_request:
                    self._queues.pop(state.index, None)
        self._notify(output_queues)

    def _notify(self, output_queues: Iterable[RequestOutputQueue]) -> None:
        """Wake the consumers of these queues, with one call per event loop.

        A consumer that was woken and has not looked yet is not woken again. Otherwise, calls
        would accumulate in a busy event loop.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestOutputQueue]] = {}
        for output_queue in output_queues:
            if not output_queue.is_notified:
                output_queue.is_notified = True
                by_loop.setdefault(output_queue.loop, []).append(output_queue)
        for loop, notified in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, notified)
            except RuntimeError:  # the event loop is closed
                for output_queue in notified:
                    self._discard(output_queue)


def _wake_all(output_queues: list[RequestOutputQueue]) -> None:
    for output_queue in output_queues:
        output_queue.event.set()


def _shut_down_error() -> ShmLLMError:
    return ShmLLMError("this AsyncLLM is shut down; make a new one")
