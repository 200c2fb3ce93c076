"""EnginePool: one client for several engines.

Every request goes to the engine at which it costs least (`routing`). If an engine ends, its
requests start over at the others: the front end has given each a seed, so the same tokens come
again, and it leaves out those that it has. This module owns the clients of the engines and the
order of events. It must not know who waits for results.

An exception of a signal handler may end any method; the next one goes on where it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from shmllm.client.attached import AttachedEngineClient
from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.flights import OTHER_WEIGHTS, Flight, Flights
from shmllm.client.pool_calls import PoolCalls, Use, sum_of_stats
from shmllm.client.private import PrivateEngineClient
from shmllm.client.protocol import (
    NO_PROGRESS,
    BucketMemory,
    DeviceSharing,
    EngineOutput,
    StartedOver,
    StartProgress,
)
from shmllm.client.revival import Revival
from shmllm.client.routing import Router
from shmllm.config.info import EngineInfo
from shmllm.errors import EngineDeadError, EngineStartError
from shmllm.ipc.error_log import LoggedError
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.recorder import Recorder
from shmllm.wire.messages import Method, Rejected, WeightVersion
from shmllm.wire.rpc import RpcCall

logger = logging.getLogger(__name__)

T = TypeVar("T")
Member = PrivateEngineClient | AttachedEngineClient

MAY_DIFFER = frozenset(
    {
        "num_blocks", "num_states", "kv_cache_bytes", "weight_bytes", "max_num_seqs", "seed",
        "num_threads", "wait_policy", "load_seconds", "device", "device_uuid", "graphs",
        "gpu_memory_utilization", "warnings", "scheduling_policy", "async_scheduling",
        "enable_prefix_caching", "max_loras", "tensor_parallel_size", "pipeline_parallel_size",
        "speculative_method", "speculative_model", "num_speculative_tokens", "max_model_len",
        "max_blocks_per_request", "max_states_per_request",
    }
)  # fmt: skip
"""The fields of EngineInfo on which no output depends, but by what an engine has room for."""


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
        self._buried: list[Member] = []
        self._revival = revival
        self._waiter = clients[0].waiter
        self._events: list[EngineOutput] = []
        self._version: int | str = 0
        self._has_losses = False
        self._death: EngineDeadError | None = None
        self._calls = PoolCalls(self, revival)
        self._recorder: Recorder | None = None
        self.sharing: DeviceSharing = clients[0].sharing
        self.connection = clients[0].connection
        self.seed = clients[0].seed
        self._on_trace: Callable[[str], None] = _ignore_trace

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
            infos = [client.wait_ready(progress) for client in self._clients]
            _check_equal(infos)
        except BaseException:
            self.close()
            raise
        first, count = infos[0], len(infos)
        self.seed = self._clients[0].seed
        self.info = replace(
            first,
            device_uuid="",
            max_model_len=min(each.max_model_len for each in infos),
            max_logprobs=min(each.max_logprobs for each in infos),
            max_loras=min(each.max_loras for each in infos),
            data_parallel_size=count,
        )
        blocks = [each.num_blocks * each.enable_prefix_caching for each in infos]
        router = Router(blocks, first.block_size)
        self._flights = Flights(router, first.block_size, first.num_rows, count)
        return self.info

    def add(self, request: EngineCoreRequest) -> None:
        self._send(self._flights.begin(request))

    def abort(self, numbers: Sequence[int]) -> None:
        for engine, those in self._flights.abort(numbers).items():
            if engine is None:
                self._has_losses = True
            else:
                self._with(engine, lambda client, those=those: client.abort(those))  # type: ignore[misc]

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        self._collect()
        if not self._events and timeout_s > 0 and not self._wait(timeout_s, urgent_only):
            for engine in [*self._flights.alive]:
                self._with(engine, ChannelEngineClient.check_alive)
        self._collect()
        return self._events

    def wake(self) -> None:
        self._waiter.wake()

    def call(self, method: Method, argument: Any = None) -> Any:
        return self._calls.call(method, argument)

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """See `EngineClient.run_on_worker`. A function gives the results of all engines, by
        engine and rank; a method that of one engine."""
        return self._calls.run_on_worker(call, timeout_s)

    def trace(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        for engine in self._flights.alive:
            self._clients[engine].trace(recorder)

    def claim_bucket(self) -> BucketMemory:
        return self._clients[min(self._flights.alive)].claim_bucket()

    def discard_bucket(self) -> None:
        for engine in self._flights.alive:
            self._clients[engine].discard_bucket()

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        first, *others = sorted(self._flights.alive)
        for engine in others:
            client = self._clients[engine]
            other = client.claim_bucket()
            other.buffer[:] = bucket.buffer
            client.send_bucket(other, pieces)
        self._clients[first].send_bucket(bucket, pieces)

    def stats(self) -> dict[str, int]:
        return sum_of_stats([self._clients[k].stats() for k in sorted(self._flights.alive)])

    def health(self) -> str:
        states = [client.health() for client in self._clients]
        if len(set(states)) == 1:
            return states[0]
        return "; ".join(f"engine {index}: {state}" for index, state in enumerate(states))

    def errors(self) -> list[LoggedError]:
        return [error for k in sorted(self._flights.alive) for error in self._clients[k].errors()]

    def stop(self) -> None:
        if self._revival is not None:
            self._revival.close()
        for client in self._clients:
            client.stop()

    def close(self) -> None:
        self.stop()
        # The first one's segment has the doorbell of all, so it is closed last.
        for client in reversed([*self._buried, *self._clients]):
            client.close()

    # Events and deaths.

    def _collect(self) -> None:
        """Take the events of all engines, and bring lost requests to engines that run."""
        for engine in self._flights.alive:
            self._take(engine)
        if self._revival is not None and self._revival.is_busy:
            self._take_revived(self._revival)
        if self._has_losses:
            self._settle_losses()

    def _take(self, engine: int) -> None:
        fresh = self._clients[engine].poll(0.0)
        if not fresh:
            return
        for event in fresh:
            self._note(engine, event)
        # All engines get new weights between the same two tokens, so one event tells the front end.
        versions = [each.version for each in fresh if isinstance(each, WeightVersion)]
        events = fresh
        if versions:
            is_known = versions[-1] == self._version
            events = [e for e in fresh if not (is_known and isinstance(e, WeightVersion))]
            self._version = versions[-1]
        # No call comes between these statements, so no exception either.
        self._events += events
        del fresh[:]

    def _note(self, engine: int, event: EngineOutput) -> None:
        """Take note of an event, once or more often."""
        if isinstance(event, OutputColumns):
            self._flights.note(event)
        elif isinstance(event, Rejected):
            self._flights.end(event.number)
        elif isinstance(event, WeightVersion):
            self._flights.versions[engine] = event.version

    def _wait(self, timeout_s: float, urgent_only: bool) -> bool:
        clients = [self._clients[engine] for engine in self._flights.alive]
        for client in clients:
            client.before_wait()
        if self._revival is not None and self._revival.is_busy:
            clients += self._revival.clients
        has_data = [client.has_outputs for client in clients]
        has_urgent = [client.has_urgent_outputs for client in clients]
        return self._waiter.wait(
            lambda: any(each() for each in has_data),
            (lambda: any(each() for each in has_urgent)) if urgent_only else None,
            time.monotonic() + timeout_s,
        )

    def _with(self, engine: int, use: Callable[[ChannelEngineClient], object]) -> bool:
        """Use the client of an engine. Returns False if the engine has ended."""
        try:
            use(self._clients[engine])
        except EngineDeadError as death:
            self._bury(engine, death)
            return False
        return True

    def _bury(self, engine: int, death: EngineDeadError) -> None:
        """An engine has ended, and its last events were taken."""
        self._take(engine)
        self._death = death
        self._has_losses = True
        self._flights.lose_engine(engine)
        plan = ""
        if self._revival is not None:
            problem = self._revival.begin(engine)
            plan = f"; it is not started again: {problem}" if problem else "; it is started again"
        logger.warning("engine %d of the pool has ended: %s%s", engine, death.args[0], plan)

    def _take_revived(self, revival: Revival) -> None:
        for engine, client in revival.ready(self._calls.is_idle):
            self._has_losses = True
            if isinstance(client, str):
                logger.warning("engine %d of the pool does not start again: %s", engine, client)
                continue
            self._settle_losses()  # what was lost with the old one is not at the new one
            client.on_trace = self._on_trace
            client.trace(self._recorder)
            self._buried.append(self._clients[engine])
            self._clients[engine] = client
            self._flights.add_engine(engine)
            logger.warning("engine %d of the pool runs again", engine)

    def _settle_losses(self) -> None:
        """Start requests over whose engine has ended."""
        flights = self._flights
        for flight, problem in flights.losses():
            if problem:
                self._events.append(flights.refuse(flight, problem))
            else:
                self._events.append(StartedOver(flight.request.number))
        for flight in flights.lost():
            number = flight.request.number
            if flight.is_aborted:
                self._events.append(_aborted(number))
                flights.end(number)
            elif flights.place_again(flight):
                self._send(flight)
            elif self._revival is None or not self._revival.is_busy:
                self._check_any()
                self._events.append(flights.refuse(flight, OTHER_WEIGHTS))
        self._has_losses = bool(flights.lost())
        self._check_any()

    def _check_any(self) -> None:
        """Raise if no engine is left, and none starts."""
        is_starting = self._revival is not None and self._revival.is_busy
        if self._death is not None and not self._flights.alive and not is_starting:
            raise self._death

    def _send(self, flight: Flight) -> None:
        """Send a request to the engine that was chosen."""
        if flight.placement is None:
            self._has_losses = True
            self._check_any()
            return
        self._with(flight.placement.engine, lambda client: client.add(flight.request))

    # What `PoolCalls` uses.

    def each(self, use: Use[T], without: Container[int] = ()) -> Iterator[tuple[int, T]]:
        """Use the clients of all engines, in turn, and yield each index with the result. An engine
        that ends meanwhile is left out.

        Args:
            use: gets a client.
            without: the indexes of engines to leave out.

        Raises:
            EngineDeadError: no engine is left.
        """
        for engine in sorted(self._flights.alive):
            if engine in without:
                continue
            try:
                result = use(self._clients[engine])
            except EngineDeadError as death:
                self._bury(engine, death)
            else:
                yield engine, result
        if not self._flights.alive and self._death is not None:
            raise self._death

    def at(self, engine: int) -> ChannelEngineClient:
        """The client of an engine."""
        return self._clients[engine]

    def collect(self) -> None:
        """Take the events of all engines."""
        self._collect()

    def clear_cached(self) -> None:
        """The engines have forgotten all prefixes."""
        self._flights.clear_cached()

    def drop(self, engine: int, reason: str) -> None:
        """Use an engine no more."""
        self._bury(engine, EngineDeadError(reason))
        self._clients[engine].stop()


def _check_equal(infos: Sequence[EngineInfo]) -> None:
    """Raise EngineStartError if engines would give other outputs for equal requests."""
    first = infos[0]
    for index, info in enumerate(infos):
        for field in fields(EngineInfo):
            ours, theirs = getattr(first, field.name), getattr(info, field.name)
            if field.name not in MAY_DIFFER and ours != theirs:
                raise EngineStartError(
                    f"the engines of a pool are equal, but {field.name} of the first one is "
                    f"{ours!r}, and of number {index + 1} {theirs!r}"
                )


def _aborted(number: int) -> OutputColumns:
    return OutputColumns(
        time_ns=time.monotonic_ns(), numbers=[number], counts=[0], finishes=[FinishReason.ABORT]
    )


def _ignore_trace(directory: str) -> None:
    """The default of `on_trace`."""
