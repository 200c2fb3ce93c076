"""How a call on a pool of engines is made of calls on each of them.

All engines of a pool do the same, or none: what some have done is undone if another one cannot do
it. This module owns the tables of both. It must not know how a call is transmitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple
from typing import Any, Protocol, TypeVar

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.revival import Revival
from shmllm.errors import EngineDeadError, RequestError, ShmLLMError
from shmllm.outputs.sleep_report import OwnedBytes, SleepReport
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall

logger = logging.getLogger(__name__)

T = TypeVar("T")
Use = Callable[[ChannelEngineClient], T]


class Engines(Protocol):
    """What calls need of an `EnginePool`, whose methods of these names are documented there."""

    def each(self, use: Use[T], without: Container[int] = ()) -> Iterator[tuple[int, T]]: ...

    def at(self, engine: int) -> ChannelEngineClient: ...

    def collect(self) -> None: ...

    def clear_cached(self) -> None: ...

    def drop(self, engine: int, reason: str) -> None: ...


def _first(answers: Sequence[Any]) -> Any:
    return answers[0]


def _reports(answers: Sequence[Any]) -> Any:
    """The sum of reports of sleeping or waking up."""
    reports = [SleepReport.from_json(answer["report"]) for answer in answers]
    before, after = (
        OwnedBytes(*map(sum, zip(*(astuple(getattr(each, name)) for each in reports), strict=True)))
        for name in ("before", "after")
    )
    asleep = tuple(dict.fromkeys(tag for each in reports for tag in each.asleep))
    total = SleepReport(
        before,
        after,
        asleep,
        max(each.num_missing for each in reports),
        sum(each.num_kept for each in reports),
        sum(each.seconds for each in reports),
    )
    warnings = dict.fromkeys(answer["warning"] for answer in answers if answer["warning"])
    return {"report": asdict(total), "warning": "; ".join(warnings)}


COMBINE: dict[Method, Callable[[Sequence[Any]], Any]] = {
    Method.RESET_PREFIX_CACHE: all,
    Method.PAUSE: sum,
    Method.RESUME: all,
    Method.SLEEP: _reports,
    Method.WAKE_UP: _reports,
    Method.ADD_LORA: any,
    Method.REMOVE_LORA: any,
    Method.PIN_LORA: all,
}
"""How the answers of all engines become one; those of other methods are equal."""

UNDO: dict[Method, Callable[[Any], tuple[Method, Any]]] = {
    Method.PAUSE: lambda _: (Method.RESUME, None),
    Method.START_WEIGHTS: lambda _: (Method.ABANDON_WEIGHTS, None),
    Method.ADD_LORA: lambda lora: (Method.REMOVE_LORA, lora["lora_int_id"]),
}
"""By method, what undoes a call with an argument: a method and its argument."""


def combined(method: Method, answers: Sequence[Any]) -> Any:
    """Make one answer of those of all engines.

    Args:
        method: the method.
        answers: the answers, of one engine at least.
    """
    return COMBINE.get(method, _first)(answers)


def sum_of_stats(stats: Sequence[dict[str, int]]) -> dict[str, int]:
    """Add up the counters and gauges of engines. A state is that of any engine that has it."""
    return {
        name: max(each[name] for each in stats) if name in _STATES else sum(e[name] for e in stats)
        for name in stats[0]
    }


_STATES = frozenset(
    {"paused", "asleep", "num_speculative_tokens", "draft_break_even", "stopped_rank"}
)


class PoolCalls:
    """Makes calls at all engines of a pool.

    Args:
        engines: the pool.
        revival: starts engines again, and then makes the calls again that it needs; None: nobody
            does.
    """

    def __init__(self, engines: Engines, revival: Revival | None) -> None:
        self._engines = engines
        self._revival = revival
        self._is_paused = False
        self._is_asleep = False
        self._level = 1
        self._reports: dict[int, Any] = {}

    @property
    def is_idle(self) -> bool:
        """Whether the engines are paused or asleep."""
        return self._is_paused or self._is_asleep

    def call(self, method: Method, argument: Any) -> Any:
        """See `EngineClient.call`."""
        if method in (Method.LEND_MEMORY, Method.STAGE_LENT):
            raise RequestError("a pool of engines gets weights through host memory")
        if method is Method.FINISH_WEIGHTS:
            return self._finish_weights(argument)
        if method is Method.SLEEP:
            return self._sleep(argument)
        if method is Method.WAKE_UP:
            return self._wake_up(argument)
        answer = self._at_all(method, argument)
        if method in (Method.PAUSE, Method.RESUME):
            self._is_paused = method is Method.PAUSE
        elif method is Method.RESET_PREFIX_CACHE:
            self._engines.clear_cached()
        if self._revival is not None:
            self._revival.called(method, argument)
        return answer

    def run_on_worker(self, call: RpcCall, timeout_s: float | None) -> Any:
        """See `EnginePool.run_on_worker`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def run(client: ChannelEngineClient) -> Any:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.001)
            return client.run_on_worker(call, left_s)

        results = [result for _, result in self._engines.each(run)]
        if self._revival is not None:
            self._revival.ran(call)
        return [each for result in results for each in result] if call.is_function else results[0]

    def _at_all(self, method: Method, argument: Any) -> Any:
        """Make a call at every engine. If one refuses, what the others have done is undone."""
        answers: dict[int, Any] = {}
        try:
            for engine, answer in self._engines.each(lambda each: each.call(method, argument)):
                answers[engine] = answer
        except BaseException:
            if method in UNDO:
                self._undo(answers, *UNDO[method](argument))
            raise
        return combined(method, [*answers.values()])

    def _undo(self, engines: Iterable[int], method: Method, argument: Any) -> None:
        for engine in engines:
            try:
                self._engines.at(engine).call(method, argument)
            except ShmLLMError as problem:
                logger.warning("engine %d of the pool: %s: %s", engine, method.name, problem)

    def _sleep(self, argument: Any) -> Any:
        """Put all engines to sleep. While requests of some have to end first, the caller repeats
        the call, which leaves out engines that sleep already."""
        waiting: dict[int, int] = {}

        def sleep(client: ChannelEngineClient) -> Any:
            return client.call(Method.SLEEP, argument)

        reports = self._reports
        try:
            for engine, answer in self._engines.each(sleep, reports):
                if isinstance(answer, int):
                    waiting[engine] = answer
                else:
                    reports[engine] = answer
        except BaseException:
            self._undo([*reports, *waiting], Method.WAKE_UP, None)
            reports.clear()
            raise
        if waiting:
            return sum(waiting.values())
        answer = combined(Method.SLEEP, [*reports.values()])
        reports.clear()
        self._is_asleep, self._level = True, argument["level"]
        return answer

    def _wake_up(self, tags: Any) -> Any:
        """Wake all engines up, or none: those that have woken up sleep again if one cannot."""
        answers: dict[int, Any] = {}
        try:
            for engine, answer in self._engines.each(lambda each: each.call(Method.WAKE_UP, tags)):
                answers[engine] = answer
        except BaseException:
            self._undo(answers, Method.SLEEP, {"level": self._level, "mode": "keep"})
            raise
        self._reports.clear()
        answer = combined(Method.WAKE_UP, [*answers.values()])
        self._is_asleep = bool(answer["report"]["asleep"])
        return answer

    def _finish_weights(self, argument: Any) -> Any:
        """Put new weights in force, between the same two tokens of each request. All engines have
        checked them before the first one uses them."""
        self._at_all(Method.CHECK_WEIGHTS, None)
        is_idle = self.is_idle
        if not is_idle:
            self._at_all(Method.PAUSE, "keep")
        try:
            self._engines.collect()  # what the weights before have sampled
            return self._use_weights(argument)
        finally:
            if not is_idle:
                self._at_all(Method.RESUME, None)

    def _use_weights(self, argument: Any) -> Any:
        problems: dict[int, ShmLLMError] = {}
        names: Any = None

        def finish(client: ChannelEngineClient) -> Any:
            try:
                return client.call(Method.FINISH_WEIGHTS, argument)
            except EngineDeadError:
                raise
            except ShmLLMError as problem:
                return problem

        for engine, answer in self._engines.each(finish):
            if isinstance(answer, ShmLLMError):
                problems[engine] = answer
            else:
                names = answer
        if names is None:
            raise next(iter(problems.values()))
        for engine, problem in problems.items():
            self._engines.drop(engine, f"it could not use new weights: {problem}")
        return names
