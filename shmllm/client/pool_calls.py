"""How a call on a pool of engines is made of calls on each of them.

All engines of a pool do the same, or none: what some have done is undone if another one cannot do
it. This module owns the tables of both. Calls on workers cannot be undone; `pool_work` sends them
to all engines. It must not know how a call is transmitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, astuple
from typing import Any, Protocol, TypeVar

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.pool_adapters import change_adapter
from shmllm.client.pool_work import Outcome, at_engine, outcome_of, results_of, run_on_workers
from shmllm.client.revival import Revival
from shmllm.client.uninterrupted import call_uninterrupted
from shmllm.errors import CallError, EngineDeadError, RequestError, ShmLLMError
from shmllm.outputs.sleep_report import OwnedBytes, SleepReport
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall

FINISH_S = 60.0
"""How long an interrupt waits until all engines have new weights, in seconds."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
Use = Callable[[ChannelEngineClient], T]


class Engines(Protocol):
    """What calls need of an `EnginePool`, whose methods of these names are documented there."""

    def each(self, use: Use[T]) -> Iterator[tuple[int, T]]: ...

    def collect(self) -> None: ...

    def clear_cached(self) -> None: ...

    def end_prefills(self) -> None: ...

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
    Method.TRANSFER_PROGRESS: sum,
    Method.ADD_LORA: any,
    Method.REMOVE_LORA: any,
    Method.PIN_LORA: all,
    Method.HOLD_LORA: all,
}
"""How the answers of all engines become one; those of other methods are equal."""

UNDO: dict[Method, Callable[[Any], tuple[Method, Any]]] = {
    Method.PAUSE: lambda _: (Method.RESUME, None),
    Method.START_WEIGHTS: lambda _: (Method.ABANDON_WEIGHTS, None),
    Method.OPEN_TRANSFER: lambda _: (Method.CLOSE_TRANSFER, None),
}
"""By method, what undoes a call with an argument: a method and its argument."""

ADAPTER_OF: dict[Method, Callable[[Any], Any]] = {
    Method.ADD_LORA: lambda lora: lora["lora_int_id"],
    Method.REMOVE_LORA: lambda number: number,
    Method.PIN_LORA: lambda number: number,
}
"""By method, which adapter a call with an argument changes. Engines restore it themselves."""


def combined(method: Method, answers: Sequence[Any]) -> Any:
    """Make one answer of those of all engines.

    Args:
        method: the method.
        answers: the answers, of one engine at least.
    """
    return COMBINE.get(method, _first)(answers)


def _named(error: ShmLLMError, engine: int) -> ShmLLMError:
    """The error with a message that names the engine."""
    named = copy(error)
    named.args = (at_engine(engine, error.args[0]), *error.args[1:])
    return named


class PoolCalls:
    """Makes calls at all engines of a pool.

    Args:
        engines: the pool.
        revival: starts engines again, and then makes the calls again that it needs; None: nobody
            does.

    Attributes:
        is_refusing: whether engines refuse new requests until they continue.
    """

    def __init__(self, engines: Engines, revival: Revival | None) -> None:
        self._engines = engines
        self._revival = revival
        self._pause_mode: str | None = None
        self._sleeps: list[tuple[Method, Any]] = []
        self._level = 1
        self._asleep: Sequence[str] = ()
        self._reports: dict[ChannelEngineClient, Any] = {}
        self.is_refusing = False

    @property
    def is_idle(self) -> bool:
        """Whether the engines are paused or asleep."""
        return self._pause_mode is not None or bool(self._sleeps)

    def prepare(self, client: ChannelEngineClient) -> None:
        """Let an engine that joins the pool pause and sleep like the others."""
        if self._pause_mode is not None:
            client.call(Method.PAUSE, self._pause_mode)
        for method, argument in self._sleeps:
            client.call(method, argument)

    def call(self, method: Method, argument: Any) -> Any:
        """See `EngineClient.call`."""
        if method in (Method.LEND_MEMORY, Method.STAGE_LENT):
            raise RequestError("a pool of engines gets weights through host memory")
        if method is Method.FINISH_WEIGHTS:
            # Half of it would leave the engines with different weights.
            return call_uninterrupted(lambda: self._finish_weights(argument), FINISH_S)
        mode = argument["mode"] if method is Method.SLEEP else argument
        if method in (Method.SLEEP, Method.PAUSE) and mode in ("abort", "wait"):
            # Requests between two engines would neither be aborted nor waited for.
            self._engines.end_prefills()
        if method is Method.SLEEP:
            return self._sleep(argument)
        if method is Method.WAKE_UP:
            return self._wake_up(argument)
        if method is Method.PAUSE:
            self.is_refusing = argument == "wait"
        answer = self._answer_of(method, argument)
        if method in (Method.PAUSE, Method.RESUME):
            self._pause_mode = argument if method is Method.PAUSE else None
            self._note_refusals()
        elif method is Method.RESET_PREFIX_CACHE and answer:
            self._engines.clear_cached()
        if self._revival is not None:
            self._revival.called(method, argument)
        return answer

    def _answer_of(self, method: Method, argument: Any) -> Any:
        def ask() -> Any:
            return self._at_all(method, argument)

        if method is Method.SET_WEIGHT_VERSION:
            # Half of it would leave the engines with different versions.
            return call_uninterrupted(ask, FINISH_S)
        if method in ADAPTER_OF:
            return self._change_adapter(ADAPTER_OF[method](argument), ask)
        return ask()

    def _change_adapter(self, number: Any, change: Callable[[], T]) -> T:
        def hold() -> bool:
            return bool(self._at_all(Method.HOLD_LORA, number))

        return change_adapter(self._engines, number, hold, change)

    def _note_refusals(self) -> None:
        sleeps = [options for method, options in self._sleeps if method is Method.SLEEP]
        self.is_refusing = self._pause_mode == "wait" or any(
            options["mode"] != "keep" for options in sleeps
        )

    def run_on_worker(self, call: RpcCall, timeout_s: float | None) -> Any:
        """See `EngineClient.run_on_worker`. All engines run the call, in the order of all calls.

        Returns:
            Of a function, the results of all engines, by engine and rank; of a method, that of one
            engine.
        """

        def run() -> dict[int, Outcome]:
            return run_on_workers(self._engines, call, timeout_s)

        try:
            if call.method == "reload_weights":
                # An engine that cannot do it would have other weights.
                return call_uninterrupted(lambda: self._use_weights(run()), FINISH_S)
            if call.method == "add_lora":
                number = call.args[1] if len(call.args) > 1 else call.kwargs.get("number")
                results = self._change_adapter(number, lambda: results_of(run(), is_undone=True))
            else:
                results = results_of(run())
        finally:
            if self._revival is not None:
                self._revival.ran(call)
        if call.is_function:
            return [each for result in results for each in result]
        if call.method == "compute_weight_checksums" and any(r != results[0] for r in results):
            raise CallError("the engines of the pool have different weights: update them all")
        return results[0]

    def _at_all(self, method: Method, argument: Any) -> Any:
        """Make a call at every engine. If one refuses, what the others have done is undone."""
        answers: dict[ChannelEngineClient, Any] = {}
        try:
            self._ask(method, argument, answers)
        except BaseException:
            if method in UNDO and not (method is Method.PAUSE and self._pause_mode is not None):
                changed = [client for client, answer in answers.items() if answer is not False]
                self._undo(changed, *UNDO[method](argument))
            if method is Method.PAUSE:
                self._note_refusals()
            raise
        return combined(method, [*answers.values()])

    def _ask(self, method: Method, argument: Any, answers: dict[ChannelEngineClient, Any]) -> None:
        """Make a call at every engine that has not answered. The answer of an engine is None while
        it is not known whether the engine has done it."""

        def ask(client: ChannelEngineClient) -> Outcome:
            if client in answers:
                return Outcome()
            answers[client] = None
            try:
                answers[client] = client.call(method, argument)
            except ShmLLMError as error:
                del answers[client]
                if isinstance(error, EngineDeadError):
                    raise
                return Outcome(error=error)
            return Outcome()

        for engine, outcome in self._engines.each(ask):
            if outcome.error is not None:
                raise _named(outcome.error, engine) from None

    def _undo(self, clients: Sequence[ChannelEngineClient], method: Method, argument: Any) -> None:
        for client in clients:
            try:
                client.call(method, argument)
            except EngineDeadError:
                pass
            except ShmLLMError as problem:
                logger.warning("%s at an engine of the pool: %s", method.name, problem)

    def _sleep(self, argument: Any) -> Any:
        """Put all engines to sleep. While requests of some have to end first, the caller repeats
        the call, which leaves out engines that sleep already."""
        reports = self._reports
        self.is_refusing = self.is_refusing or argument["mode"] != "keep"
        try:
            self._ask(Method.SLEEP, argument, reports)
        except BaseException:
            self._end_sleeping()
            raise
        waiting = {client: num for client, num in reports.items() if isinstance(num, int)}
        for client in waiting:
            del reports[client]
        if waiting:
            return sum(waiting.values())
        answer = combined(Method.SLEEP, [*reports.values()])
        reports.clear()
        self._sleeps.append((Method.SLEEP, argument))
        self._level, self._asleep = argument["level"], answer["report"]["asleep"]
        self._note_refusals()
        if argument["level"] > 0:
            self._engines.clear_cached()
        return answer

    def _end_sleeping(self) -> None:
        """Wake the engines up that an unfinished call has put to sleep."""
        clients = [*self._reports]
        self._reports.clear()
        if not self._sleeps:
            self._undo(clients, Method.WAKE_UP, None)
        self._note_refusals()

    def _wake_up(self, tags: Any) -> Any:
        """Wake all engines up, or none: those that have woken up sleep again if one cannot."""
        self._end_sleeping()
        answers: dict[ChannelEngineClient, Any] = {}
        try:
            self._ask(Method.WAKE_UP, tags, answers)
        except BaseException:
            # Weights that were awake must not be lost.
            level = self._level if "weights" in self._asleep else min(self._level, 1)
            if self._sleeps:
                self._undo([*answers], Method.SLEEP, {"level": level, "mode": "keep"})
            raise
        answer = combined(Method.WAKE_UP, [*answers.values()])
        self._asleep = answer["report"]["asleep"]
        self._sleeps = [*self._sleeps, (Method.WAKE_UP, tags)] if self._asleep else []
        self._note_refusals()
        return answer

    def _finish_weights(self, argument: Any) -> Any:
        """Put new weights in force, between the same two tokens of each request. All engines have
        checked them before the first one uses them."""

        def finish(client: ChannelEngineClient) -> Outcome:
            return outcome_of(lambda: client.call(Method.FINISH_WEIGHTS, argument))

        self._at_all(Method.CHECK_WEIGHTS, None)
        is_idle = self.is_idle
        if not is_idle:
            self._at_all(Method.PAUSE, "keep")
        try:
            self._engines.collect()  # what the weights before have sampled
            return self._use_weights(dict(self._engines.each(finish)))
        finally:
            if not is_idle:
                self._at_all(Method.RESUME, None)

    def _use_weights(self, outcomes: Mapping[int, Outcome]) -> Any:
        """Engines use new weights, with these outcomes. Those that could not, or that needed too
        long, are used no more, unless no engine could."""
        problems = {engine: each.error for engine, each in outcomes.items() if each.error}
        answers = [each.result for each in outcomes.values() if each.error is None]
        if not answers:
            raise next(iter(problems.values()))
        if self._revival is not None:
            self._revival.weights_changed()
        for engine, problem in problems.items():
            self._engines.drop(engine, f"it could not use new weights: {problem}")
        return answers[-1]
