"""EnginePool: one client for several engines.

Every request goes to the engine at which it costs least (`routing`). If an engine ends, its
requests start over at the others: the front end has given each a seed, so the same tokens come
again, and it leaves out those that it has. This module owns the clients of the engines and the
order of events. It must not know who waits for results.

An exception of a signal handler may end any method; the next one goes on where it was.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shmllm.client.attached import AttachedEngineClient
from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.equal_engines import bounded, check_equal, check_values, info_of_all
from shmllm.client.flight import Flight
from shmllm.client.flights import OTHER_WEIGHTS, Flights, aborted, make_flights
from shmllm.client.phases import Phase
from shmllm.client.pool_buckets import PoolBuckets
from shmllm.client.pool_calls import PoolCalls, Use
from shmllm.client.pool_stats import PastStats
from shmllm.client.private import PrivateEngineClient
from shmllm.client.protocol import (
    NO_PROGRESS,
    BucketMemory,
    DeviceSharing,
    EngineOutput,
    StartedOver,
    StartProgress,
    ignore_trace,
)
from shmllm.client.revival import Revival
from shmllm.client.together import await_all, health_of, stop_all, wait_for_any
from shmllm.client.uninterrupted import call_uninterrupted
from shmllm.config.info import EngineInfo
from shmllm.errors import EngineDeadError, ShmLLMError
from shmllm.ipc.error_log import LoggedError
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.recorder import Recorder
from shmllm.wire.messages import SHUTTING_DOWN, Method, Rejected, WeightVersion
from shmllm.wire.rpc import RpcCall

logger = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_S = 0.1
"""How often a front end looks whether the engines live, in seconds, while outputs arrive."""
TEND_S = 10.0
"""How long an interrupt waits until requests have started over, in seconds."""
Member = PrivateEngineClient | AttachedEngineClient


class EnginePool:
    """An `EngineClient` for several engines.

    Args:
        clients: the clients of engines of the same model, which share a waiter. The pool closes
            them.
        revival: starts engines again that have ended; None: nobody does.
    """

    info: EngineInfo
    _flights: Flights

    def __init__(self, clients: Sequence[Member], revival: Revival | None = None) -> None:
        self._clients = [*clients]
        self._first = clients[0]
        self._revival = revival
        self._waiter = clients[0].waiter
        self._events: list[EngineOutput] = []
        self._version: int | str = 0
        self._has_losses = False
        self._deaths: dict[int, EngineDeadError] = {}
        self._death: EngineDeadError | None = None
        self._tending = threading.Lock()
        self._next_check_s = 0.0
        self._past = PastStats()
        own = weakref.proxy(self)  # no cycle: `del` ends engines
        self._buckets = PoolBuckets(own)
        self._calls = PoolCalls(own, revival)
        self._recorder: Recorder | None = None
        self.sharing: DeviceSharing = clients[0].sharing
        self.connection = clients[0].connection
        self.seed = clients[0].seed
        self._on_trace: Callable[[str], None] = ignore_trace

    @property
    def pid(self) -> int:
        """The pid of the first engine's process."""
        return self._clients[0].pid

    @property
    def pids(self) -> list[int]:
        """The pids of the processes of the engines that run."""
        return [self._clients[index].pid for index in sorted(self._flights.alive)]

    @property
    def on_trace(self) -> Callable[[str], None]:
        """See `EngineClient.on_trace`."""
        return self._on_trace

    @on_trace.setter
    def on_trace(self, call: Callable[[str], None]) -> None:
        self._on_trace = call
        for client in self._clients:
            client.on_trace = call

    def wait_ready(self, progress: StartProgress = NO_PROGRESS) -> EngineInfo:
        """Wait until all engines are ready. Raises EngineStartError; then all of them end."""
        try:
            infos = await_all(self._clients, self._waiter, progress)
            check_equal(infos)
            versions = [client.call(Method.GET_WEIGHT_VERSION) for client in self._clients]
            check_values("the version of the weights", versions)
        except BaseException:
            self.close()
            raise
        self.seed = self._clients[0].seed
        self._first.set_policy(sum(each.num_threads for each in infos))
        self.info = info_of_all(infos)
        self._flights = make_flights(infos, versions)
        self._version = versions[0]
        return self.info

    def add(self, request: EngineCoreRequest) -> None:
        self._check_alive()  # a death before the request is none of its deaths
        own = bounded(request, self.info.max_model_len)
        self._send(self._flights.begin(own, is_whole=self._calls.is_refusing))

    def abort(self, numbers: Sequence[int]) -> None:
        for engine, those in self._flights.abort(numbers).items():
            if engine is None:
                self._has_losses = True
            else:
                self._abort_at(engine, those)

    def _abort_at(self, engine: int, numbers: Sequence[int]) -> None:
        self._with(engine, lambda client: client.abort(numbers))

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        self.collect()
        if self._events or timeout_s <= 0:
            self._check_alive()  # although other engines have news all the time
        else:
            self._check_alive(is_due=not self._wait(timeout_s, urgent_only))
            self.collect()
        return self._events

    def _check_alive(self, is_due: bool = False) -> None:
        """Look whether the engines live, at most every CHECK_S seconds unless it is due."""
        if is_due or time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + CHECK_S
            for engine in [*self._flights.alive]:
                self._with(engine, lambda client: client.check_alive())

    def wake(self) -> None:
        self._waiter.wake()

    def call(self, method: Method, argument: Any = None) -> Any:
        return self._calls.call(method, argument)

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """See `PoolCalls.run_on_worker`."""
        return self._calls.run_on_worker(call, timeout_s)

    def trace(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        for client in self._clients:
            client.trace(recorder)

    def claim_bucket(self) -> BucketMemory:
        return self._buckets.claim()

    def discard_bucket(self) -> None:
        self._buckets.discard()

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        self._buckets.send(bucket, pieces)

    def stats(self) -> dict[str, int]:
        return self._past.with_those_of(self._clients, self._flights.alive)

    def health(self) -> str:
        return health_of(self._clients)

    def errors(self) -> list[LoggedError]:
        return [error for k in sorted(self._flights.alive) for error in self._clients[k].errors()]

    def stop(self) -> None:
        if self._revival is not None:
            self._revival.close()
        stop_all(self._clients)

    def close(self) -> None:
        self.stop()
        # The first one's segment has the doorbell of all, so it is closed last.
        first = self._first
        for client in [each for each in self._clients if each is not first] + [first]:
            client.close()

    # Events and deaths.

    def collect(self) -> None:
        """Take the events of all engines, and bring lost requests to engines that run."""
        for engine in self._flights.alive:
            self._take(engine)
        if self._has_losses or self._is_starting:
            # An exception in the middle could lose a request, or send it twice.
            call_uninterrupted(self._tend, TEND_S)

    def _take(self, engine: int) -> None:
        client, flights = self._clients[engine], self._flights
        fresh = client.poll(0.0)
        if not fresh:
            return
        is_ending = client.is_ending
        events = [each for event in fresh for each in flights.note(engine, event, is_ending)]
        self._has_losses = self._has_losses or [*map(id, events)] != [*map(id, fresh)]
        # All engines get new weights between the same two tokens, so one event tells the front end.
        versions = [each.version for each in events if isinstance(each, WeightVersion)]
        version = versions[-1] if versions else self._version
        if version == self._version:
            events = [event for event in events if not isinstance(event, WeightVersion)]
        else:
            flights.clear_cached()
            if self._revival is not None:
                self._revival.weights_changed()
        # No call comes between these statements, so no exception either.
        self._events += events
        self._version = version
        del fresh[:]

    def _wait(self, timeout_s: float, urgent_only: bool) -> bool:
        clients = [self._clients[engine] for engine in self._flights.alive]
        starting = [] if self._revival is None else self._revival.clients
        return wait_for_any([*clients, *starting], self._waiter, timeout_s, urgent_only)

    def _with(self, engine: int, use: Callable[[ChannelEngineClient], object]) -> None:
        """Use the client of an engine, unless the engine has ended."""
        try:
            if engine in self._flights.alive:
                use(self._clients[engine])
        except EngineDeadError as death:
            self._bury(engine, death)

    def _bury(self, engine: int, death: EngineDeadError) -> None:
        """An engine has ended, and its last events were taken."""
        self._take(engine)
        self._death = self._deaths[engine] = death
        self._has_losses = True
        self._flights.lose_engine(engine, self._clients[engine].ring.consumed_position)

    @property
    def _is_starting(self) -> bool:
        """Whether an engine starts again, or is going to."""
        return self._revival is not None and (bool(self._deaths) or self._revival.is_busy)

    def _tend(self) -> None:
        """Start engines again, and lost requests over. One thread at a time does it."""
        if not self._tending.acquire(blocking=False):
            return
        try:
            for engine, death in [*self._deaths.items()]:
                self._flights.lose_engine(engine, self._clients[engine].ring.consumed_position)
                self._start_again(engine, death, "has ended")
                self._deaths.pop(engine, None)
            if self._revival is not None:
                self._take_revived(self._revival)
            if self._has_losses:
                self._settle_losses()
        finally:
            self._tending.release()
        if not self._events:
            self._check_any()

    def _start_again(self, engine: int, reason: ShmLLMError, what: str) -> None:
        plan = ""
        if self._revival is not None:
            problem = self._revival.begin(engine)
            plan = f"; it is not started again: {problem}" if problem else "; it is started again"
        logger.warning("engine %d of the pool %s: %s%s", engine, what, reason.args[0], plan)

    def _take_revived(self, revival: Revival) -> None:
        for engine, client in revival.ready(self._calls.prepare, self._may_join):
            self._has_losses = True
            if isinstance(client, ShmLLMError):
                self._start_again(engine, client, "has not started")
                continue
            self._lose_stranded()  # what was lost with the old one is not at the new one
            client.on_trace = self._on_trace
            client.trace(self._recorder)
            before = self._clients[engine]
            with self._past.lock:
                self._past.add(before.stats())
                self._clients[engine] = client
                self._flights.add_engine(engine)
            logger.warning("engine %d of the pool runs again", engine)
            if before is not self._first:
                before.close()

    def _may_join(self) -> bool:
        """Whether no engine runs a call, which may be writing weights."""
        return not any(self._clients[engine].open_calls for engine in self._flights.alive)

    def _lose_stranded(self) -> None:
        """Tell the front end which requests start over."""
        for flight in self._flights.stranded():
            if self._flights.lose(flight):
                self._events.append(StartedOver(flight.request.number))

    def _settle_losses(self) -> None:
        """Start requests over whose engine has ended, or end them."""
        flights = self._flights
        self._lose_stranded()
        for flight in flights.lost():
            number = flight.request.number
            if flight.is_aborted:
                self._events.append(aborted([number]))
            elif flight.problem:
                self._events.append(Rejected(number, flight.problem))
            elif self._calls.is_refusing:
                continue
            elif flights.place_again(flight):
                self._send(flight)
                continue
            elif self._is_starting or not flights.alive:
                continue
            else:
                reason = OTHER_WEIGHTS if flights.open else SHUTTING_DOWN
                self._events.append(Rejected(number, reason))
            flights.end(number)
        self._has_losses = bool(flights.lost() or flights.stranded())

    def _check_any(self) -> None:
        """Raise if no engine is left, and none starts."""
        if self._death is not None and not self._flights.alive and not self._is_starting:
            raise self._death

    def _send(self, flight: Flight) -> None:
        """Send a request to the engine that was chosen."""
        if flight.placement is None:
            if flight.phase is not Phase.WAIT:
                self._has_losses = True
                self._check_any()
            return
        engine = flight.placement.engine
        self._with(engine, lambda client: client.add(flight.sent))
        flight.sent_at = self._clients[engine].ring.position

    # What `PoolCalls` uses.

    def each(self, use: Use[T]) -> Iterator[tuple[int, T]]:
        """Use the clients of all engines, in turn, and yield each index with the result. An engine
        that ends meanwhile is left out.

        Args:
            use: gets a client.

        Raises:
            EngineDeadError: no engine is left.
        """
        while not self._flights.alive:
            self.collect()
            self._check_any()
            if not self._flights.alive:
                self._wait(CHECK_S, False)
        for engine in sorted(self._flights.alive):
            try:
                result = use(self._clients[engine])
            except EngineDeadError as death:
                self._bury(engine, death)
            else:
                yield engine, result
        if not self._flights.alive and self._death is not None:
            raise self._death

    def clear_cached(self) -> None:
        """The engines have forgotten all prefixes."""
        self._flights.clear_cached()

    def end_prefills(self) -> None:
        """Send all requests to engines that serve all of them."""
        self._has_losses = True
        for engine, numbers in self._flights.end_prefills().items():
            self._abort_at(engine, numbers)
        self.collect()

    def drop(self, engine: int, reason: str) -> None:
        """Use an engine no more."""
        self._bury(engine, EngineDeadError(reason))
        self._clients[engine].stop()
