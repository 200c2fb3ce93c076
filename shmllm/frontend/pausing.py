"""Pausing an engine and putting it to sleep, as steps.

A call that has to wait for requests to end yields each time it has to be repeated. So `LLM` can
poll the engine between the steps, and `AsyncLLM` can run other coroutines.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

from shmllm.frontend.dispatcher import Dispatcher
from shmllm.outputs.sleep_report import TAGS, SleepReport
from shmllm.wire.messages import Method

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
Call = Callable[[Method, Any], Any]

PARTS = sum(TAGS.values())
PUMP_S = 0.1


def pause(dispatcher: Dispatcher, mode: PauseMode, clear_cache: bool) -> Iterator[None]:
    """Pause the engine; yields each time requests still have to end."""
    while dispatcher.call(Method.PAUSE, mode) and mode == "wait":
        yield
    if clear_cache:
        dispatcher.call(Method.RESET_PREFIX_CACHE, {"running": mode == "keep"})


def resume(dispatcher: Dispatcher) -> bool:
    """End this front end's pause. Returns whether the engine continues."""
    return bool(dispatcher.call(Method.RESUME))


def fall_asleep(call: Call, level: int, mode: str) -> Generator[None, None, SleepReport]:
    """Put the engine to sleep; yields each time requests still have to end.

    Args:
        call: calls a method of the engine.
        level: 0, 1 or 2; see `LLM.sleep`.
        mode: a PauseMode.
    """
    argument = {"level": level, "mode": mode}
    is_waiting = False
    try:
        while isinstance(answer := call(Method.SLEEP, argument), int):
            is_waiting = True
            yield
    except BaseException:
        if is_waiting:
            with contextlib.suppress(Exception):
                call(Method.WAKE_UP, [])  # makes the engine take requests again
        raise
    return _report(answer)


def next_or_value(steps: Generator[None, None, SleepReport]) -> SleepReport | None:
    """Run one step. Returns the report if it was the last one."""
    try:
        next(steps)
    except StopIteration as done:
        report: SleepReport = done.value
        return report
    return None


def wake_up(call: Call, tags: Sequence[str] | None) -> SleepReport:
    """Wake up the parts of the engine that the tags name; None stands for all parts."""
    return _report(call(Method.WAKE_UP, tags if tags is None or isinstance(tags, str) else [*tags]))


def is_fully_awake(report: SleepReport) -> bool:
    """Whether no part sleeps and no weight is missing."""
    return not report.asleep and not report.num_missing


def is_asleep(statistics: Mapping[str, int]) -> bool:
    """Whether a part of the engine sleeps."""
    return bool(statistics["asleep"] & PARTS)


def _report(answer: dict[str, Any]) -> SleepReport:
    report = SleepReport.from_json(answer["report"])
    if answer["warning"]:
        logger.warning("%s", answer["warning"])
    else:
        logger.info("%s", report)
    return report
