"""Calls on the workers of all engines of a pool, at the same time.

A call is sent to all engines that live or to none, in one step that no signal handler interrupts,
so all engines run the same calls in the same order, whatever their results are and whoever waits
for them. This module must not know what becomes of engines whose results differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.held_signals import call_with_signals_held
from shmllm.client.worker_call import WorkerCall
from shmllm.errors import EngineDeadError, ShmLLMError
from shmllm.wire.rpc import RpcCall

T = TypeVar("T")


class HasEach(Protocol):
    """The method of `EnginePool` that uses the client of each engine that lives."""

    def each(self, use: Callable[[ChannelEngineClient], T]) -> Iterator[tuple[int, T]]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call has given at one engine.

    Attributes:
        result: the result.
        error: the error in its place, or None.
    """

    result: Any = None
    error: ShmLLMError | None = None


def at_engine(engine: int, message: Any) -> str:
    """The message of an error, with the engine that it comes from."""
    return f"engine {engine} of the pool: {message}"


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Call a function, and return what it gives. The death of the engine is raised."""
    try:
        return Outcome(function())
    except EngineDeadError:
        raise
    except ShmLLMError as error:
        return Outcome(error=error)


def run_on_workers(engines: HasEach, call: RpcCall, timeout_s: float | None) -> dict[int, Outcome]:
    """Run a call on the workers of all engines.

    Args:
        engines: the pool.
        call: the call.
        timeout_s: how many seconds to wait for the results; None waits without limit.

    Returns:
        The outcome at each engine that has not ended meanwhile, by its index.

    Raises:
        RequestError, IpcError: the call cannot be transmitted. No engine has got it.
        EngineDeadError: no engine is left.
    """
    works: dict[ChannelEngineClient, WorkerCall] = {}

    def prepare(client: ChannelEngineClient) -> WorkerCall:
        works[client] = client.worker_call(call, timeout_s)
        works[client].prepare()
        return works[client]

    def send(prepared: list[WorkerCall]) -> None:
        for work in prepared:
            work.send()

    def take(client: ChannelEngineClient) -> Outcome:
        return outcome_of(works[client].result)

    try:
        prepared = [work for _, work in engines.each(prepare)]
        call_with_signals_held(lambda: send(prepared))
        outcomes = dict(engines.each(take))
        _end(works)
        return outcomes
    except BaseException:
        _end(works)
        raise


def _end(works: Mapping[ChannelEngineClient, WorkerCall]) -> None:
    for work in works.values():
        work.end()


def results_of(outcomes: Mapping[int, Outcome], is_undone: bool = False) -> list[Any]:
    """The results of all engines, by engine.

    Args:
        outcomes: the outcomes by engine.
        is_undone: whether the caller undoes the call if an engine has an error.

    Raises:
        ShmLLMError: there is an error. If all engines have errors of one class, that of the first
            engine; else the first one, with a message that names the engines.
    """
    errors = {engine: each.error for engine, each in outcomes.items() if each.error is not None}
    if not errors:
        return [each.result for each in outcomes.values()]
    first = next(iter(errors.values()))
    if len(errors) < len(outcomes) or len({*map(type, errors.values())}) > 1:
        first.args = (_in_words(errors, [] if is_undone else [*outcomes]) + _END[is_undone],)
    raise first


_END = {False: ", so their states may differ", True: ""}


def _in_words(errors: Mapping[int, ShmLLMError], engines: Iterable[int]) -> str:
    parts = [at_engine(engine, error.args[0]) for engine, error in errors.items()]
    others = sorted({*engines} - errors.keys())
    return "; ".join([*parts, *(f"engine {engine} of the pool ran the call" for engine in others)])
