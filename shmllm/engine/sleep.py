"""Has the engine fall asleep and wake up: what that means for requests and for memory.

Owns the order of things, and the reports. What is asleep and what follows from a call are
`core.sleeping`'s rules; who asked, and how, is not its business.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter

from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.pausing import PauseMode, Pauses
from shmllm.core.scheduler import Scheduler
from shmllm.core.sleeping import Level, Memory, Sleeping
from shmllm.outputs.sleep_report import OwnedBytes, SleepReport, SleepState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slept:
    """What came of a call.

    Attributes:
        report: bytes by owner, and the state.
        warning: why the call was not needed, or only in part; empty if it was.
    """

    report: SleepReport
    warning: str


class Sleeper:
    """
    Args:
        scheduler: has the requests.
        kv_cache: has their blocks.
        holds: where the engine is held still.
        memory: what can be given back.
    """

    def __init__(
        self, scheduler: Scheduler, kv_cache: KVCacheManager, pauses: Pauses, memory: Memory
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._pauses = pauses
        self._memory = memory
        self._sleeping = Sleeping(pauses, memory)

    @property
    def state(self) -> SleepState:
        """What is asleep or missing."""
        return self._sleeping.state

    @property
    def is_frozen(self) -> bool:
        """Whether no request can go on until something is woken up or written."""
        return bool(self.state)

    def drain(self, client: int) -> int:
        """Refuse new requests. Returns how many have to end before a front end's sleep can
        begin; those that are frozen anyway do not count."""
        if self._pauses.is_frozen or not self._scheduler.has_unfinished():
            return 0
        self._sleeping.drain(client)
        return self._num_unfinished

    def stop_draining(self, client: int) -> None:
        """No longer for this front end."""
        self._sleeping.stop_draining(client)

    def sleep(self, client: int, level: Level, mode: PauseMode) -> Slept:
        """Fall asleep, or deeper. Requests that there are still will be recomputed if their
        keys and values go."""
        before, began = self._memory.measure(), perf_counter()
        self.stop_draining(client)
        warning = self._sleeping.warning(level)
        if SleepState.KV_CACHE in level.parts:
            self._scheduler.preempt_all()
            self._kv_cache.reset_prefix_cache()
        self._sleeping.sleep(level, mode)
        return self._slept(before, began, warning)

    def wake(self, client: int, parts: SleepState | None) -> Slept:
        """Wake parts up, None for all; a front end that waits to fall asleep gives that up.

        Raises:
            RequestError: there is not enough memory.
        """
        before, began = self._memory.measure(), perf_counter()
        self.stop_draining(client)
        warning = self._sleeping.wake(parts)
        return self._slept(before, began, warning)

    def weights_written(self) -> None:
        """Weights were."""
        self._sleeping.weights_written()

    @property
    def _num_unfinished(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    def _slept(self, before: OwnedBytes, began: float, warning: str) -> Slept:
        seconds = perf_counter() - began
        report = SleepReport(
            before,
            self._memory.measure(),
            tuple(self._sleeping.asleep.tags),
            self._memory.num_missing,
            self._num_unfinished,
            seconds,
        )
        logger.info("%s", warning or report)
        return Slept(report, warning)
