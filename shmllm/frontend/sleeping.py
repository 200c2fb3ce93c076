"""Sleeping and waking up: the methods of LLM, and their steps for whoever waits in between.

Owns how the engine's answers become reports, warnings and booleans.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.pausing import PUMP_S, PauseMode
from shmllm.outputs.sleep_report import TAGS, SleepReport
from shmllm.wire.messages import Method

logger = logging.getLogger(__name__)

Call = Callable[[Method, Any], Any]
PARTS = sum(TAGS.values())


def fall_asleep(call: Call, level: int, mode: str) -> Generator[None, None, SleepReport]:
    """Have the engine fall asleep; yields as often as it has to be waited for requests to end.

    Args:
        call: asks the engine.
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
                call(Method.WAKE_UP, [])  # has it take requests again
        raise
    return _take(answer)


def next_or_value(steps: Generator[None, None, SleepReport]) -> SleepReport | None:
    """Take a step; what they return if that was the last."""
    try:
        next(steps)
    except StopIteration as done:
        report: SleepReport = done.value
        return report
    return None


def wake_up(call: Call, tags: Sequence[str] | None) -> SleepReport:
    """Have the engine wake up, or parts of it."""
    return _take(call(Method.WAKE_UP, tags if tags is None or isinstance(tags, str) else [*tags]))


def is_fully_awake(report: SleepReport) -> bool:
    """Whether everything can be generated."""
    return not report.asleep and not report.num_missing


def is_asleep(statistics: Mapping[str, int]) -> bool:
    """Whether a part of the engine sleeps."""
    return bool(statistics["asleep"] & PARTS)


def _take(answer: dict[str, Any]) -> SleepReport:
    report = SleepReport.from_json(answer["report"])
    if answer["warning"]:
        logger.warning("%s", answer["warning"])
    else:
        logger.info("%s", report)
    return report


class SleepMethods:
    """What LLM inherits."""

    _dispatcher: Dispatcher

    def get_metrics(self) -> dict[str, int]:
        raise NotImplementedError

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport:
        """Have the engine give memory back until `wake_up`.

        A call that is not needed, because the engine sleeps already, logs a warning.

        Args:
            level: 0 only stops scheduling. 1 drops keys and values; on a CPU the weights stay
                where they are. 2 drops the weights, too: they have to be written again before
                anything can be generated.
            mode: what becomes of requests. "abort" ends them, with reason "abort"; "wait"
                returns when they have ended; "keep" keeps them, to go on when the engine is
                awake. New ones are queued with "keep", and refused with EnginePausedError
                otherwise, so do not wait for them in the thread that has to wake it up.

        Returns:
            The bytes that each owner held before and holds after; a line for logs as `str`.

        Raises:
            RequestError: there is no such level or mode.
        """
        steps = fall_asleep(self._dispatcher.call, level, mode)
        with contextlib.closing(steps):
            while (report := next_or_value(steps)) is None:
                self._dispatcher.pump(PUMP_S)
        return report

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Have the engine wake up, or parts of it, in any order.

        A call that is not needed logs a warning.

        Args:
            tags: of "weights", "kv_cache" and "scheduling", which comes with the last of the
                other two by itself. None for all.

        Returns:
            Whether it is fully awake: no part sleeps and no weight is missing.

        Raises:
            RequestError: there is no such tag, or not enough memory.
        """
        return is_fully_awake(wake_up(self._dispatcher.call, tags))

    def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps. Does not ask it."""
        return is_asleep(self.get_metrics())
