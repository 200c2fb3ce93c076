"""The thread that waits for an engine so that an event loop need not.

Owns everything that AsyncLLM does with the engine: it alone submits, polls and aborts, and
tells event loops that there is something to take. Must not know what a coroutine does with
it.
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
from shmllm.frontend.dispatcher import POLL_S, RequestGroup
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_output_queue import RequestOutputQueue
from shmllm.frontend.request_state import RequestState
from shmllm.params.sampling import RequestOutputKind

Result = TypeVar("Result")

COMMANDS_PER_POLL = 32
STOP_S = 5.0


class PollThread:
    """
    Args:
        front_end: of the engine; nobody else waits for it.

    Attributes:
        death: what ended the thread, None while it can work.
    """

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._dispatcher = front_end.dispatcher
        self._group = RequestGroup()
        self._boxes: dict[int, RequestOutputQueue] = {}
        self._next_index = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self.death: BaseException | None = None

    def submit(
        self, box: RequestOutputQueue, prepare: Callable[[], PreparedRequest], request_id: str
    ) -> None:
        """Have a request made and sent, whose outputs, or whose error, come into the
        mailbox."""
        self._put(lambda: self._submit(box, prepare, request_id))

    def abort(self, box: RequestOutputQueue) -> None:
        """End a request; its last output says so."""
        self._put(lambda: self._dispatcher.abort(box.running()))

    def drop(self, box: RequestOutputQueue) -> None:
        """End a request whose outputs nobody wants any more."""
        self._put(lambda: self._drop(box))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function of the front end in the thread."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as problem:
                future.set_exception(problem)

        self._put(run)
        return future

    def stop(self) -> None:
        """End the thread; who waits gets an error. Idempotent."""
        self._is_stopping = True
        with self._start:
            thread = self._thread
        if thread is None:
            self.death = self.death or _shut_down_error()
        elif thread is not threading.current_thread():
            self._wake_up(lambda: None)
            thread.join(STOP_S)

    def _put(self, command: Callable[[], None]) -> None:
        self._check_alive()
        with self._start:
            if self._thread is None and not self._is_stopping:
                thread = threading.Thread(target=self._run, name="shmllm", daemon=True)
                thread.start()
                self._thread = thread  # started: a thread that is not alive has ended
        self._wake_up(command)
        self._check_alive()  # or it ended meanwhile, and has left this in the queue

    def _check_alive(self) -> None:
        if self.death is not None:
            raise copy.copy(self.death)
        if self._thread is not None and not self._thread.is_alive() and self.death is None:
            raise ShmLLMError("this AsyncLLM belongs to the process that forked this one")

    def _wake_up(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._front_end.client.wake()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._work()
            raise _shut_down_error()
        except BaseException as death:
            self.death = death
        for box in list(self._boxes.values()):
            box.error = self.death
        self._tell(self._boxes.values())

    def _work(self) -> None:
        """Do what was put, then wait for the engine; with nothing under way, for commands."""
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
        self, box: RequestOutputQueue, prepare: Callable[[], PreparedRequest], request_id: str
    ) -> None:
        index = box.index = self._next_index
        self._next_index += 1
        self._boxes[index] = box
        try:
            request = prepare()
        except RequestError as error:
            box.error = error
            self._tell([self._boxes.pop(index)])
            return
        streaming = request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        box.states = self._dispatcher.submit(
            self._group, request, index, streaming=streaming, request_id=request_id
        )

    def _drop(self, box: RequestOutputQueue) -> None:
        if self._boxes.pop(box.index, None) is not None:
            self._dispatcher.drop(self._group, box.states)

    def _deliver(self, changed: list[RequestState]) -> None:
        with self._dispatcher.reading():
            boxes = [box for state in changed if (box := self._boxes.get(state.index)) is not None]
            for state in changed:
                if (box := self._boxes.get(state.index)) is not None:
                    box.changed[state.number] = state
                if state.ends_request:
                    self._boxes.pop(state.index, None)
        self._tell(boxes)

    def _tell(self, boxes: Iterable[RequestOutputQueue]) -> None:
        """Wake the coroutines that wait; one that was told already is not told again, so
        that an event loop that is busy does not gather calls."""
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestOutputQueue]] = {}
        for box in boxes:
            if not box.is_told:
                box.is_told = True
                by_loop.setdefault(box.loop, []).append(box)
        for loop, told in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, told)
            except RuntimeError:  # the loop is closed
                for box in told:
                    self._drop(box)


def _wake_all(boxes: list[RequestOutputQueue]) -> None:
    for box in boxes:
        box.event.set()


def _shut_down_error() -> ShmLLMError:
    return ShmLLMError("this AsyncLLM is shut down; make a new one")
