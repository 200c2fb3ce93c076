"""Calls the stat loggers of a front end at an interval, from a thread of their own.

The thread reads the engine's counters from shared memory, so the engine does nothing for it. A
logger that raises is named in the log and called no more. Without loggers there is no thread.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shmllm.client.protocol import EngineClient
from shmllm.errors import EngineStartError
from shmllm.outputs.sleep_report import SleepState
from shmllm.plugins.entry_points import STAT_LOGGERS, load_plugins
from shmllm.plugins.qualified_names import in_one_line
from shmllm.plugins.stat_logger import StatLoggerBase, statistics

logger = logging.getLogger(__name__)

JOIN_S = 5.0
"""How long `close` waits for the last record."""
ENGINE_INDEX = 0


class StatLoggers:
    """
    Args:
        loggers: the loggers, made already.
        client: the client of the engine, which the thread does not keep alive.
        interval_s: the time between two records, in seconds.
    """

    def __init__(
        self, loggers: Iterable[StatLoggerBase], client: EngineClient, interval_s: float
    ) -> None:
        self._loggers = list(loggers)
        self._client = weakref.ref(client)
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._loggers:
            self._before = client.stats()
            self._call(lambda each: each.log_engine_initialized())
            run, name = self._run, "shmllm-stat-loggers"
            self._thread = threading.Thread(target=run, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Make the last record and end the thread. Idempotent."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._interval_s)
            client = self._client()
            if client is None:
                return
            self._record(client)
            del client  # the thread must not keep the engine alive while it waits

    def _record(self, client: EngineClient) -> None:
        try:
            now = client.stats()
        except Exception:
            return  # the connection is closed
        before, self._before = self._before, now
        of_scheduler, of_interval = statistics(now, before, time.time())
        sleeping = _sleep_state(now)
        if sleeping != _sleep_state(before):
            self._call(lambda each: each.record_sleep_state(*sleeping))
        self._call(lambda each: each.record(of_scheduler, of_interval, engine_idx=ENGINE_INDEX))
        self._call(lambda each: each.log())

    def _call(self, function: Callable[[StatLoggerBase], None]) -> None:
        for each in list(self._loggers):
            try:
                function(each)
            except Exception as problem:
                self._loggers.remove(each)
                name = f"{type(each).__module__}:{type(each).__qualname__}"
                logger.warning(
                    "the stat logger %s is called no more: %s", name, in_one_line(problem)
                )


def make_loggers(given: Any, config: Any) -> list[StatLoggerBase]:
    """Make the loggers of installed plugins, and those of the option `stat_loggers`.

    Args:
        given: the option: None, or classes and functions of (config, engine index).
        config: the engine's configuration, for the loggers.

    Raises:
        EngineStartError: the option is wrong, or one of its loggers cannot be made. A plugin that
            cannot be made is named in the log.
    """
    if given is not None and not isinstance(given, list | tuple):
        raise EngineStartError(f"stat_loggers must be a list of classes, got {given!r}")
    made = []
    plugins, problems = load_plugins(STAT_LOGGERS)
    for name, factory in plugins.items():
        try:
            made.append(_make(factory, config))
        except EngineStartError as problem:
            problems.append(f"the plugin {name} is not used: {problem}")
    for text in problems:
        logger.warning("%s", text)
    return made + [_make(factory, config) for factory in given or ()]


def _make(factory: Any, config: Any) -> StatLoggerBase:
    try:
        made = factory(config, ENGINE_INDEX)
    except Exception as problem:
        raise EngineStartError(
            f"the stat logger {factory!r} cannot be made: {in_one_line(problem)}"
        ) from problem
    if not callable(getattr(made, "record", None)):
        raise EngineStartError(f"the stat logger {factory!r} made {made!r}, which has no record()")
    return made  # type: ignore[no-any-return]


def _sleep_state(stats: Mapping[str, int]) -> tuple[int, int]:
    """Return (whether the engine sleeps, the level of its sleep), as 0 or a positive number."""
    asleep = SleepState(stats["asleep"])
    if not asleep & ~SleepState.MISSING:
        return 0, 0
    return 1, 2 if SleepState.MISSING in asleep else int(SleepState.KV_CACHE in asleep)
