"""Between a front end's requests and its engine: one poller, results to whom they belong.

A caller's requests are a RequestGroup. Whoever collects for its group polls the engine and
puts what comes to all groups, so several of them can be under way at once: in several
threads, or one within the loop of another. One thread at a time talks to the engine; a
thread that wants to send wakes the one that polls.

Must not know what the groups are for, nor how requests are checked or text is made.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from shmllm.client.protocol import EngineClient, EngineOutput, Lease
from shmllm.errors import EngineDeadError, ShmLLMError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_state import RequestState
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall

logger = logging.getLogger(__name__)

POLL_S = 1.0
LEAVE_S = 0.05
CLOSE_S = 2.0


class Outputs(Protocol):
    """What an OutputProcessor does for a dispatcher."""

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
    """Requests of one caller.

    Attributes:
        num_open: requests whose end the caller has not collected.
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
    """
    Args:
        client: the engine.
        outputs: makes states of what the engine sends.

    Attributes:
        outputs: may be replaced by what stands in front of it.
    """

    def __init__(self, client: EngineClient, outputs: Outputs) -> None:
        self._client = client
        self.outputs = outputs
        self._groups: dict[int, RequestGroup] = {}
        self._urgent: set[int] = set()
        self._left: deque[RequestGroup] = deque()
        # Held for moments, never while the engine is waited for: `_is_polling` says that.
        # No RLock: the garbage collector may close a generator in the middle of anything,
        # and its `leave` must not slip into what its own thread is doing.
        self._turn = threading.Condition(threading.Lock())
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
            index: its place among the caller's requests.
            streaming: decode tokens as they come.
            time_tokens: fill `state.token_times`.
            request_id: what users know it by; None counts requests.

        Returns:
            One state for each of its completions.
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
        """The states of the group that changed, each once; waits for the first.

        Returns early, and empty, if something came for others. Where nobody looks at text on
        its way, tokens are taken several at a time, and a front end sleeps meanwhile.

        Raises:
            EngineDeadError: the engine died.
        """
        deadline = time.monotonic() + timeout_s
        with self._turn:
            self.check_open()
            while self._is_polling or self._num_senders:
                left_s = deadline - time.monotonic()
                if group._changed or left_s <= 0:
                    return group._take()
                self._turn.wait(left_s)
            if group._changed:
                return group._take()
            self._abort_left()
            self._is_polling = True
        events: Sequence[EngineOutput] = ()
        try:
            left_s = max(0.0, deadline - time.monotonic())
            events = self._client.poll(left_s, urgent_only=not self._urgent)
        except EngineDeadError:
            self.check_open()  # ended by `close` in another thread
            raise
        finally:
            with self._turn:
                # At once: what another thread polls is newer, and must not overtake this.
                self._is_polling = False
                self._turn.notify_all()
                self._route(events)
        with self._turn:
            return group._take()

    def pump(self, timeout_s: float) -> None:
        """Put what the engine sends to the groups; waits for the first of it."""
        self.collect(RequestGroup(), timeout_s)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Other threads' polls change no state meanwhile."""
        with self._turn:
            yield

    def abort(self, numbers: Sequence[int]) -> None:
        """End requests; each gets a last output, "abort" unless it had already ended."""
        with self._sending():
            self._client.abort(numbers)

    def drop(self, group: RequestGroup, states: Sequence[RequestState]) -> None:
        """Abort one request of the group, which has not ended, and forget it."""
        with self._sending():
            group.num_open -= 1
            for state in states:
                group._changed.pop(state.number, None)
            self._forget(group, [s.number for s in states if s.number in group._running])

    def leave(self, group: RequestGroup) -> None:
        """Abort what still runs of the group, and forget it. Raises nothing, and may be
        called from wherever a generator is closed."""
        if not group._running:
            return
        self._left.append(group)
        if self._turn.acquire(timeout=LEAVE_S):
            try:
                if self._is_polling:
                    self._client.wake()
                else:
                    self._abort_left()
            finally:
                self._turn.release()

    def call(self, method: Method, argument: Any = None) -> Any:
        """Ask the engine for something and wait for the answer; see `EngineClient.call`."""
        with self._sending():
            return self._client.call(method, argument)

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """See `EngineClient.run_on_worker`. Others wait meanwhile."""
        with self._sending():
            return self._client.run_on_worker(call, timeout_s)

    def claim_bucket(self) -> Lease:
        """See `EngineClient.claim_bucket`. Others wait meanwhile, not while it is filled."""
        with self._sending():
            return self._client.claim_bucket()

    def send_bucket(self, bucket: Lease, pieces: str) -> None:
        """See `EngineClient.send_bucket`."""
        with self._sending():
            self._client.send_bucket(bucket, pieces)

    def close(self) -> None:
        """End the engine, or leave it. A thread that polls gets an error now."""
        self._is_closed = True
        self._client.stop()
        # A signal handler may have come here out of what its own thread does with the turn.
        is_mine = self._turn.acquire(timeout=CLOSE_S)
        try:
            if is_mine:  # memory that another thread still looks at must not go
                self._turn.wait_for(lambda: not self._is_polling, CLOSE_S)
            self._client.close()
        finally:
            if is_mine:
                self._turn.release()

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        with self._turn:
            self.check_open()
            self._num_senders += 1
            try:
                while self._is_polling:
                    self._client.wake()
                    self._turn.wait()
                self._abort_left()
                yield
            finally:
                self._num_senders -= 1
                self._turn.notify_all()

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

    def _abort_left(self) -> None:
        while self._left:
            group = self._left.popleft()
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
            logger.debug("the engine died before its requests could be aborted")
