"""Dispatcher: sends a front end's requests to the engine and routes results to their callers.

The requests of one caller form a RequestGroup. A caller that collects the results of its group
polls the engine and routes the results of all groups. So several groups can be open at once, in
several threads or in nested loops of one thread. One thread at a time uses the engine client; a
thread that wants to send wakes the thread that polls.

This module must not know who the callers are, nor how requests are checked or text is decoded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from shmllm.client.protocol import BucketMemory, EngineClient, EngineOutput
from shmllm.errors import EngineDeadError, ShmLLMError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_state import RequestState
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""The time for which callers usually wait in one `collect`, in seconds."""
DISCARD_S = 0.05
"""The time for which `discard_group` waits for the lock, in seconds."""
CLOSE_S = 2.0
"""The time for which `close` waits for the lock, and for a thread that polls, in seconds."""


class Outputs(Protocol):
    """The methods of OutputProcessor that the dispatcher uses."""

    def add_all(
        self,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool = False,
        request_id: str | None = None,
    ) -> list[RequestState]: ...
    def discard(self, numbers: Iterable[int]) -> list[int]: ...
    def process(self, events: Iterable[EngineOutput]) -> tuple[list[RequestState], list[int]]: ...


class RequestGroup:
    """The requests of one caller.

    Attributes:
        num_open: the number of requests whose end the caller has not collected.
    """

    __slots__ = ("_changed", "_num_ended", "_running", "num_open")

    def __init__(self) -> None:
        self.num_open = 0
        self._running: dict[int, RequestState] = {}
        self._changed: dict[int, RequestState] = {}
        self._num_ended = 0

    def _take(self) -> list[RequestState]:
        changed = list(self._changed.values())
        self._changed.clear()
        self.num_open -= self._num_ended
        self._num_ended = 0
        return changed


class Dispatcher:
    """Shares one engine client between the request groups of a front end.

    Args:
        client: the client of the engine.
        outputs: keeps the states of the requests up to date.

    Attributes:
        outputs: the same; `FrontEndTracing` replaces it by a wrapper that records.
    """

    def __init__(self, client: EngineClient, outputs: Outputs) -> None:
        self._client = client
        self.outputs = outputs
        self._groups: dict[int, RequestGroup] = {}
        self._urgent: set[int] = set()
        self._discarded: deque[RequestGroup] = deque()
        # No thread holds the lock while it waits for the engine: `_is_polling` marks that time.
        # The lock is not reentrant: the garbage collector may close a generator at any point of
        # a thread, and the generator's `discard_group` must not enter a section that this
        # thread holds.
        self._lock = threading.Condition(threading.Lock())
        self._is_polling = False
        self._num_senders = 0
        self._is_closed = False

    def check_open(self) -> None:
        """Raise ShmLLMError after `close`."""
        if self._is_closed:
            raise ShmLLMError("this LLM is closed; make a new one")

    def submit(
        self,
        group: RequestGroup,
        request: PreparedRequest,
        index: int,
        *,
        streaming: bool = False,
        time_tokens: bool = False,
        request_id: str | None = None,
    ) -> list[RequestState]:
        """Send a request of the group to the engine.

        Args:
            group: the caller's group.
            request: the checked request.
            index: its position among the caller's requests.
            streaming: decode tokens when they arrive.
            time_tokens: record the time of each token in `state.token_times`.
            request_id: the id in its outputs; None uses a counter of the requests.

        Returns:
            One state for each of its completions.

        Raises:
            ShmLLMError: the dispatcher is closed.
            EngineDeadError: the engine process ended.
        """
        with self._sending():
            states = self.outputs.add_all(request, index, streaming, time_tokens, request_id)
            for state in states:
                self._groups[state.number] = group
                group._running[state.number] = state
                if state.text_is_urgent:
                    self._urgent.add(state.number)
            group.num_open += 1
            for state in states:
                self._client.add(state.request.message(state.number))
            return states

    def collect(self, group: RequestGroup, timeout_s: float) -> list[RequestState]:
        """Wait until a state of the group has changed, and return the changed states.

        If no request of the front end needs text while it runs, the poll waits for urgent
        outputs only: the tokens of several steps arrive together, and the thread sleeps
        meanwhile.

        Args:
            group: the caller's group.
            timeout_s: the longest time to wait, in seconds.

        Returns:
            Each changed state once. The list can be empty before `timeout_s` if the engine
            sent only outputs of other groups.

        Raises:
            EngineDeadError: the engine process ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self.check_open()
            while self._is_polling or self._num_senders:
                left_s = deadline - time.monotonic()
                if group._changed or left_s <= 0:
                    return group._take()
                self._lock.wait(left_s)
            if group._changed:
                return group._take()
            self._abort_discarded()
            self._is_polling = True
        events: Sequence[EngineOutput] = ()
        try:
            left_s = max(0.0, deadline - time.monotonic())
            events = self._client.poll(left_s, urgent_only=not self._urgent)
        except EngineDeadError:
            self.check_open()  # ended by `close` in another thread
            raise
        finally:
            with self._lock:
                # In the same section as `_is_polling`: the events of the next poll, in another
                # thread, are newer and must be processed after these.
                self._is_polling = False
                self._lock.notify_all()
                self._route(events)
        with self._lock:
            return group._take()

    def pump(self, timeout_s: float) -> None:
        """Poll the engine and route the results to the groups, without a group of its own."""
        self.collect(RequestGroup(), timeout_s)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which no other thread changes the states of requests."""
        with self._lock:
            yield

    def abort(self, numbers: Sequence[int]) -> None:
        """Abort requests. Each one that has not ended gets a last output with "abort"."""
        with self._sending():
            self._client.abort(numbers)

    def discard(self, group: RequestGroup, states: Sequence[RequestState]) -> None:
        """Abort one unfinished request of the group and drop its outputs.

        Args:
            group: the group of the request.
            states: the states of all of its completions.
        """
        with self._sending():
            group.num_open -= 1
            for state in states:
                group._changed.pop(state.number, None)
            self._forget(group, [s.number for s in states if s.number in group._running])

    def discard_group(self, group: RequestGroup) -> None:
        """Abort the unfinished requests of the group and drop their outputs.

        This method raises nothing. A generator may call it when it is closed, at any point of
        any thread: if the lock is held, the next call of another method aborts the requests.
        """
        if not group._running:
            return
        self._discarded.append(group)
        if self._lock.acquire(timeout=DISCARD_S):
            try:
                if self._is_polling:
                    self._client.wake()
                else:
                    self._abort_discarded()
            finally:
                self._lock.release()

    def call(self, method: Method, argument: Any = None) -> Any:
        """Call a method of the engine and wait for the result; see `EngineClient.call`."""
        with self._sending():
            return self._client.call(method, argument)

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """See `EngineClient.run_on_worker`. Other threads wait for the result, too."""
        with self._sending():
            return self._client.run_on_worker(call, timeout_s)

    def claim_bucket(self) -> BucketMemory:
        """See `EngineClient.claim_bucket`. Other threads wait until the bucket is claimed."""
        with self._sending():
            return self._client.claim_bucket()

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        """See `EngineClient.send_bucket`."""
        with self._sending():
            self._client.send_bucket(bucket, pieces)

    def close(self) -> None:
        """End a private engine, or disconnect from a named one. A thread that polls gets a
        ShmLLMError."""
        self._is_closed = True
        self._client.stop()
        # A signal handler may run this while its own thread holds the lock: do not wait forever.
        is_mine = self._lock.acquire(timeout=CLOSE_S)
        try:
            if is_mine:  # the client must not unmap memory that another thread reads
                self._lock.wait_for(lambda: not self._is_polling, CLOSE_S)
            self._client.close()
        finally:
            if is_mine:
                self._lock.release()

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """A context in which this thread alone uses the client."""
        with self._lock:
            self.check_open()
            self._num_senders += 1
            try:
                while self._is_polling:
                    self._client.wake()
                    self._lock.wait()
                self._abort_discarded()
                yield
            finally:
                self._num_senders -= 1
                self._lock.notify_all()

    def _route(self, events: Iterable[EngineOutput]) -> None:
        changed, to_abort = self.outputs.process(events)
        groups = self._groups
        for state in changed:
            number = state.number
            group = groups[number]
            group._changed[number] = state
            if state.finish_reason is not None:
                del groups[number], group._running[number]
                self._urgent.discard(number)
                group._num_ended += state.ends_request
        if to_abort:
            self._client.abort(to_abort)

    def _abort_discarded(self) -> None:
        while self._discarded:
            group = self._discarded.popleft()
            group._changed.clear()
            self._forget(group, list(group._running))

    def _forget(self, group: RequestGroup, numbers: list[int]) -> None:
        self.outputs.discard(numbers)
        for number in numbers:
            del self._groups[number], group._running[number]
        self._urgent.difference_update(numbers)
        try:
            self._client.abort(numbers)
        except ShmLLMError:
            logger.debug("the engine process ended before its requests could be aborted")
