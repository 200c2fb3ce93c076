"""Dispatcher: sends a front end's requests to the engine and routes results to their callers.

The requests of one caller form a RequestGroup. A caller that collects the results of its group
polls the engine and routes the results of all groups. So several groups can be open at once, in
several threads or in nested loops of one thread. One thread at a time uses the engine client; a
thread that wants to send wakes the thread that polls.

An exception of a signal handler may end any method, also while it waits. Then the request of an
interrupted `submit` was never sent, or is aborted; the turn is free, and events that were not
processed are processed later. Such an exception comes at a call, at the beginning of a function
or at the end of a loop's turn, so the comments here say where no call may come in between.

This module must not know who the callers are, nor how requests are checked or text is decoded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from shmllm.client.protocol import EngineClient, EngineOutput
from shmllm.client.uninterrupted import call_uninterrupted
from shmllm.errors import ShmLLMError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_group import Outputs, RequestGroup
from shmllm.frontend.request_state import RequestState
from shmllm.params.request import unseeded
from shmllm.wire.messages import Method

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_S = 1.0
"""The time for which callers usually wait in one `collect`, in seconds."""
DISCARD_S = 0.05
"""The time for which `discard_group` waits for the lock, in seconds."""
PAUSE_S = 0.001
"""The time between two looks whether the lock is free, in seconds."""
CLOSE_S = 2.0
"""The time for which `close` waits for other threads that use the client, in seconds."""
RECHECK_S = 0.1
"""The longest time for which a thread waits for another one before it looks again, in seconds: an
exception may have ended the other thread before it woke this one."""
COURTESY_S = 0.01
"""The time for which a thread that wants to poll lets threads that send go first, in seconds."""


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
        # No thread holds the lock while it waits for another thread or, in `collect`, for the
        # engine: `_poller` is the id of the thread that polls. The lock is not reentrant: the
        # garbage collector may close a generator at any point of a thread, and the generator's
        # `discard_group` must not enter a section that this thread holds.
        self._lock = threading.Lock()
        self._poller: int | None = None
        self._senders: list[threading.Lock] = []
        self._waiters: list[threading.Lock] = []
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
        return self._send(
            lambda: self._submit(group, request, index, streaming, time_tokens, request_id)
        )

    def _submit(
        self,
        group: RequestGroup,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool,
        request_id: str | None,
    ) -> list[RequestState]:
        states: list[RequestState] = []
        try:
            # No loop here ends with an `if`; see `FrontEnd.serve`.
            states = self.outputs.add_all(request, index, streaming, time_tokens, request_id)
            for state in states:
                self._groups[state.number] = group
                group._running[state.number] = state
            self._urgent.update(state.number for state in states if state.text_is_urgent)
            for state in states:
                seed = unseeded(self._client.seed, state.number)
                self._client.add(state.request.message(state.number, seed))
            group.num_open += 1
            return states
        except BaseException:
            self._forget(group, [state.number for state in states])
            self.outputs.discard_all_but(self._groups)
            raise

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
        me = threading.get_ident()
        self._check_not_nested(me)
        try:
            if not self._begin_poll(group, deadline, me):
                return group._take()
            left_s = max(0.0, deadline - time.monotonic())
            events = self._client.poll(left_s, urgent_only=not self._urgent)
            with self._lock:
                # In the same section as `_poller`: the events of the next poll, in another
                # thread, are newer and must be processed after these.
                self._route(group, events)
                self._poller = None
                self._wake_waiters()
                return group._take()
        except BaseException as error:
            if self._poller == me:
                # Before any call, where a second exception may end this.
                self._poller = None
                self._wake_waiters()
            if isinstance(error, Exception):
                self.check_open()  # ended by `close` in another thread
            raise

    def _begin_poll(self, group: RequestGroup, deadline: float, me: int) -> bool:
        """Wait until this thread may poll, and mark it as the poller. Returns False if a state of
        the group changes before that, or at the deadline."""
        while True:
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                self.check_open()
                left_s = deadline - time.monotonic()
                is_free = self._poller is None and not self._senders
                if group._changed or (left_s <= 0 and not is_free):
                    return False
                if is_free:
                    self._abort_discarded()
                    self._poller = me
                    return True
                is_polled = self._poller is not None
                self._waiters.append(waiter)
            pause_s = min(RECHECK_S if is_polled else COURTESY_S, left_s)
            if not waiter.acquire(timeout=pause_s) and not is_polled:
                # Those that still wait append themselves again; the others were interrupted.
                with self._lock:
                    self._senders.clear()

    def _wake_waiters(self) -> None:
        for waiters in (self._senders, self._waiters):
            for waiter in waiters:
                if waiter.locked():
                    waiter.release()
        self._waiters.clear()

    def pump(self, timeout_s: float) -> None:
        """Poll the engine and route the results to the groups, without a group of its own."""
        self.collect(RequestGroup(), timeout_s)

    def reading(self) -> AbstractContextManager[Any]:
        """A context in which no other thread changes the states of requests."""
        return self._lock

    def abort(self, numbers: Sequence[int]) -> None:
        """Abort requests. Each one that has not ended gets a last output with "abort"."""
        self._send(lambda: self._client.abort(numbers))

    def discard(self, group: RequestGroup, states: Sequence[RequestState]) -> None:
        """Abort one unfinished request of the group and drop its outputs.

        Args:
            group: the group of the request.
            states: the states of all of its completions.
        """
        self._send(lambda: self._discard(group, states))

    def _discard(self, group: RequestGroup, states: Sequence[RequestState]) -> None:
        for state in states:
            group._changed.pop(state.number, None)
        self._forget(group, [s.number for s in states if s.number in group._running])
        group.num_open -= 1

    def discard_from(self, group: RequestGroup, index: int) -> None:
        """Abort the requests of the group from an index on, and drop their outputs."""

        def discard() -> None:
            states = {**group._running, **group._changed}
            numbers = [number for number, state in states.items() if state.index >= index]
            self._forget(group, numbers)
            for number in numbers:
                group._changed.pop(number, None)
            group._num_ended = sum(s.ends_request for s in group._changed.values())
            indexes = {s.index for s in group._running.values()}
            group.num_open = group._num_ended + len(indexes)

        self._send(discard)

    def discard_group(self, group: RequestGroup) -> None:
        """Abort the unfinished requests of the group and drop their outputs.

        This method raises nothing. A generator may call it when it is closed, at any point of
        any thread: if the lock is held, the next call of another method aborts the requests.
        """
        if not group._running:
            return
        self._discarded.append(group)
        deadline = time.monotonic() + DISCARD_S
        while self._lock.locked():  # perhaps by this thread
            if time.monotonic() >= deadline:
                return
            time.sleep(PAUSE_S)
        with self._lock:
            if self._poller is None:
                self._abort_discarded()
                return
        self._client.wake()

    def call(self, method: Method, argument: Any = None) -> Any:
        """Call a method of the engine and wait for the result; see `EngineClient.call`.

        The outputs that the engine published before its answer have reached their groups when
        this returns: after a pause, nothing arrives any more.
        """

        def call() -> Any:
            answer = self._client.call(method, argument)
            self._route(RequestGroup(), self._client.poll(0.0))
            return answer

        return self._send(call)

    def use_client(self, function: Callable[[EngineClient], Result]) -> Result:
        """Call a function with the engine's client, and return its result. Other threads wait."""
        return self._send(lambda: function(self._client))

    def close(self) -> None:
        """End a private engine, or disconnect from a named one. A thread that polls gets a
        ShmLLMError. Idempotent; a second call goes on where an exception ended the first one."""
        self._is_closed = True
        self._client.stop()
        # This only waits until no other thread uses the client; it takes no lock, because a signal
        # handler may run it while its own thread holds the lock.
        me = threading.get_ident()
        deadline = time.monotonic() + CLOSE_S
        while self._lock.locked() or self._poller not in (None, me):
            if time.monotonic() >= deadline:
                break
            time.sleep(PAUSE_S)
        self._client.close()

    def _send(self, function: Callable[[], Result]) -> Result:
        """Call a function while this thread alone uses the client, and return its result."""
        self._check_not_nested(threading.get_ident())
        waiter = threading.Lock()
        waiter.acquire()
        try:
            while True:
                self.check_open()
                with self._lock:
                    if waiter in self._senders:
                        self._senders.remove(waiter)
                    if self._poller is None:
                        return self._run_alone(function)
                    self._senders.append(waiter)
                self._client.wake()
                waiter.acquire(timeout=RECHECK_S)
        except BaseException as error:
            if waiter in self._senders:
                self._senders.remove(waiter)
            if isinstance(error, Exception):
                self.check_open()  # ended by `close` in another thread
            raise

    def _run_alone(self, function: Callable[[], Result]) -> Result:
        self.check_open()
        self._abort_discarded()
        result = function()
        self._wake_waiters()
        return result

    def _check_not_nested(self, me: int) -> None:
        if self._poller == me:
            raise ShmLLMError(
                "a signal handler cannot use the LLM while its own thread waits in it; raise an "
                "exception there, and use the LLM after it"
            )

    def _route(self, group: RequestGroup, events: list[EngineOutput]) -> None:
        """Apply events to the requests of all groups.

        If an exception ends this in the middle, the states are in disorder. That matters only for
        requests that their caller does not discard then: those of other groups, and of groups
        that are kept. Another thread applies their events, which no signal handler interrupts.
        """
        if not events:
            return
        if group.is_kept or len(self._groups) != len(group._running):
            call_uninterrupted(lambda: self._apply(events))
        else:
            self._apply(events)

    def _apply(self, events: list[EngineOutput]) -> None:
        changed, to_abort = self.outputs.process(events)
        if to_abort:  # while their groups still know them, and would abort them after an exception
            self._client.abort(to_abort)
        groups = self._groups
        for state in changed:
            number = state.number
            group = groups[number]
            group._changed[number] = state
            if state.finish_reason is not None:
                del groups[number], group._running[number]
                self._urgent.discard(number)
                group._num_ended += state.ends_request
        events.clear()

    def _abort_discarded(self) -> None:
        while self._discarded:
            group = self._discarded[0]
            self._forget(group, list(group._running))
            group._changed = {}
            self._discarded.popleft()

    def _forget(self, group: RequestGroup, numbers: list[int]) -> None:
        """Abort requests and drop their outputs. Idempotent: an exception may end it."""
        if not numbers:
            return
        try:
            self._client.abort(numbers)
        except ShmLLMError:
            logger.debug("the engine process ended before its requests could be aborted")
        self.outputs.discard(numbers)
        self._urgent.difference_update(numbers)
        for number in numbers:
            self._groups.pop(number, None)
            group._running.pop(number, None)
