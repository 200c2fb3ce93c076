"""Puts an engine to sleep and wakes it up: the rules, and their effect on requests and memory.

    level   parts that fall asleep             weights
    0       scheduling                         not affected
    1       scheduling, kv_cache, weights      kept in place or in host memory
    2       scheduling, kv_cache, weights      discarded

    part         while asleep                  after waking up
    scheduling   the engine runs no step       the engine runs steps
    kv_cache     there are no cached prefixes  the KV cache is empty
    weights      must not be read or written   kept weights are unchanged; discarded weights are
                                               missing until they are written

A reload that fails while it overwrites the weights leaves them missing too.

Each part wakes up by its tag; scheduling also wakes up together with the last of the other two
parts. A sleep does not change a part that is already asleep, except that level 2 discards kept
weights. The engine is fully awake when no part is asleep and no weight is missing. Until then a
pause is in force.

`SleepStateMachine` holds these rules and that pause. `Sleeper` applies them to requests and memory
and reports the result. `Memory` is the interface of the memory itself. This module must not know
how memory is released or which front end asked.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.pausing import Pause, PauseMode, Pauses
from shmllm.core.scheduler import Scheduler
from shmllm.errors import RequestError
from shmllm.outputs.sleep_report import TAGS, OwnedBytes, SleepReport, SleepState

logger = logging.getLogger(__name__)

OWNER = "sleep"
DRAINING = Pause(
    False, "the engine goes to sleep when its requests have ended, and takes no new ones"
)
MEMORY = SleepState.KV_CACHE | SleepState.WEIGHTS


@dataclass(frozen=True, slots=True)
class Level:
    """
    Attributes:
        parts: the parts that this level puts to sleep.
        keeps_weights: whether the weights return unchanged.
    """

    parts: SleepState
    keeps_weights: bool


LEVELS = {
    0: Level(SleepState.SCHEDULING, keeps_weights=True),
    1: Level(SleepState.SCHEDULING | MEMORY, keeps_weights=True),
    2: Level(SleepState.SCHEDULING | MEMORY, keeps_weights=False),
}


class Memory(Protocol):
    """The memory of a runner, which can be released while the engine sleeps."""

    @property
    def num_missing(self) -> int:
        """The number of weights that were discarded or damaged and not written since."""

    def release(self, part: SleepState, keep: bool) -> None:
        """Release the memory of the weights or of the KV cache.

        Args:
            part: WEIGHTS or KV_CACHE.
            keep: `restore` has to bring the contents back.

        Raises:
            RequestError: there is no room to keep the contents; nothing changed.
        """

    def restore(self, part: SleepState) -> None:
        """Allocate the memory again, at the same addresses.

        Raises:
            RequestError: there is not enough memory; nothing changed.
        """

    def tidy(self) -> None:
        """Return freed memory to the system, after `release` or when every part is awake."""

    def measure(self) -> OwnedBytes:
        """The bytes that each owner holds now."""


class SleepStateMachine:
    """
    Args:
        pauses: the pauses of the engine.
        memory: the memory to release and restore.

    Attributes:
        asleep: the parts that are asleep.
    """

    def __init__(self, pauses: Pauses, memory: Memory) -> None:
        self.asleep = SleepState(0)
        self._pauses = pauses
        self._memory = memory
        self._mode = PauseMode.ABORT
        self._are_weights_kept = True

    @property
    def state(self) -> SleepState:
        """The parts that are asleep, and MISSING if weights are missing."""
        return self.asleep | SleepState.MISSING if self._memory.num_missing else self.asleep

    def drain(self, client: int) -> None:
        """Refuse new requests until a front end's sleep begins or is cancelled."""
        self._pauses.add((OWNER, client), DRAINING)

    def stop_draining(self, client: int) -> None:
        """End `drain`, because the sleep begins, was cancelled, or its front end disconnected."""
        self._pauses.drop((OWNER, client))

    def warning(self, level: Level) -> str:
        """Why going to sleep changes nothing; an empty string if it does change something."""
        if not self._newly_asleep(level) and not self._discards_kept_weights(level):
            return f"the engine is asleep already: {', '.join(self.asleep.tags)}"
        return ""

    def sleep(self, level: Level, mode: PauseMode) -> None:
        """Put the parts of a level to sleep. The caller has already handled the requests.

        Args:
            level: the level of the sleep.
            mode: KEEP queues new requests, and the other modes refuse them. If the engine is
                asleep already, WAIT changes neither.

        Raises:
            RequestError: there is no room to keep the weights; nothing changed.
        """
        parts, discards = self._newly_asleep(level), self._discards_kept_weights(level)
        if SleepState.WEIGHTS in parts or discards:
            self._memory.release(SleepState.WEIGHTS, level.keeps_weights)
            self._are_weights_kept = level.keeps_weights
        if SleepState.KV_CACHE in parts:
            self._memory.release(SleepState.KV_CACHE, keep=False)
        if not self.asleep or mode is not PauseMode.WAIT:
            self._mode = mode
        self.asleep |= parts
        self._update_pause()
        if parts & MEMORY or discards:
            self._memory.tidy()

    def wake(self, parts: SleepState | None) -> str:
        """Wake parts up, or all parts if `parts` is None.

        Returns:
            Why the call changes nothing, or only a part; otherwise an empty string.

        Raises:
            RequestError: there is not enough memory; the parts that were not woken stay asleep.
        """
        sleeping = self.asleep if parts is None else parts & self.asleep
        warning = self._wake_warning(parts)
        try:
            for part in (SleepState.WEIGHTS, SleepState.KV_CACHE):
                if part in sleeping:
                    self._memory.restore(part)
                    self.asleep &= ~part
            self.asleep &= ~(sleeping & SleepState.SCHEDULING)
            if sleeping & MEMORY and not self.asleep & MEMORY:
                self.asleep = SleepState(0)
        finally:
            self._update_pause()
        return warning

    def weights_written(self) -> None:
        """Update the pause after weights were written: none may be missing any more."""
        self._update_pause()

    def _newly_asleep(self, level: Level) -> SleepState:
        """The parts that this level would put to sleep and that are awake now."""
        return level.parts & ~self.asleep

    def _discards_kept_weights(self, level: Level) -> bool:
        """Whether this level discards weights that an earlier sleep kept."""
        is_kept = SleepState.WEIGHTS in self.asleep and self._are_weights_kept
        return is_kept and not level.keeps_weights

    def _wake_warning(self, parts: SleepState | None) -> str:
        """Why waking these parts changes nothing, or only a part; otherwise an empty string."""
        if not self.asleep:
            missing = f", but {self._missing_message()}" if self._memory.num_missing else ""
            return f"the engine is not asleep{missing}"
        if parts is not None and not parts:
            return "no tag was given: nothing was woken"
        awake = (parts or SleepState(0)) & ~self.asleep
        return f"not asleep: {', '.join(awake.tags)}" if awake else ""

    def _missing_message(self) -> str:
        return (
            f"{self._memory.num_missing:,} weights are missing since sleep(level=2), or since a "
            "reload that failed while it read them: write them with load_weights, update_weights "
            'or collective_rpc("reload_weights"), or run `shmllm engine wake` on a named engine'
        )

    def _update_pause(self) -> None:
        """Make the pause match the state. When the pause ends, also return to the system the
        memory that the writing of weights has freed."""
        if self.asleep:
            refusal = f"the engine sleeps ({', '.join(self.asleep.tags)}): call wake_up() first"
            if self._mode is PauseMode.KEEP:
                refusal = ""
            self._pauses.add(OWNER, Pause(True, refusal))
        elif self._memory.num_missing:
            self._pauses.add(OWNER, Pause(True, self._missing_message()))
        elif self._pauses.drop(OWNER):
            self._memory.tidy()


def level_of(number: object) -> Level:
    """The level of this number.

    Raises:
        RequestError: no level has this number.
    """
    if type(number) is not int or number not in LEVELS:
        raise RequestError(f"the level of a sleep is 0, 1 or 2, got {number!r}")
    return LEVELS[number]


def parts_of(tags: object) -> SleepState | None:
    """The parts that tags name. None stands for all parts and returns None.

    Raises:
        RequestError: `tags` is not a list, or a tag is unknown.
    """
    if tags is None:
        return None
    names = ", ".join(map(repr, TAGS))
    if not isinstance(tags, list | tuple):
        raise RequestError(f"tags is None or a list of {names}, got {tags!r}")
    for tag in tags:
        if not isinstance(tag, str) or tag not in TAGS:
            raise RequestError(f"a tag is one of {names}, got {tag!r}")
    parts = SleepState(0)
    for tag in tags:
        parts |= TAGS[tag]
    return parts


@dataclass(frozen=True, slots=True)
class SleepResult:
    """The result of going to sleep or waking up.

    Attributes:
        report: the bytes of each owner before and after, and the state.
        warning: why the call changed nothing or only a part; otherwise an empty string.
    """

    report: SleepReport
    warning: str


class Sleeper:
    """
    Args:
        scheduler: owns the requests.
        kv_cache: owns their blocks.
        pauses: the pauses of the engine.
        memory: the memory to release and restore.
    """

    def __init__(
        self, scheduler: Scheduler, kv_cache: KVCacheManager, pauses: Pauses, memory: Memory
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._pauses = pauses
        self._memory = memory
        self._states = SleepStateMachine(pauses, memory)

    @property
    def state(self) -> SleepState:
        """The parts that are asleep, and MISSING if weights are missing."""
        return self._states.state

    @property
    def is_frozen(self) -> bool:
        """Whether no request can continue until a part is woken or weights are written."""
        return bool(self.state)

    def drain(self, client: int) -> int:
        """Refuse new requests before a front end's sleep.

        Returns:
            How many requests have to end before the sleep can begin. Requests that a pause
            freezes do not count.
        """
        if self._pauses.is_frozen or not self._scheduler.has_unfinished():
            return 0
        self._states.drain(client)
        return self._num_unfinished

    def drains(self, client: int) -> bool:
        """Whether `drain` of this front end refuses new requests."""
        return (OWNER, client) in self._pauses

    def stop_draining(self, client: int) -> None:
        """End the refusal of new requests that this front end's `drain` began."""
        self._states.stop_draining(client)

    def sleep(self, client: int, level: Level, mode: PauseMode) -> SleepResult:
        """Put the parts of a level to sleep. Requests whose keys and values are dropped are
        recomputed after waking up."""
        before, began = self._memory.measure(), perf_counter()
        self.stop_draining(client)
        warning = self._states.warning(level)
        if SleepState.KV_CACHE in level.parts:
            self._scheduler.preempt_all()
            self._kv_cache.reset_prefix_cache()
            self._scheduler.encoder_cache.reset()
        self._states.sleep(level, mode)
        return self._result(before, began, warning)

    def wake(self, client: int, parts: SleepState | None) -> SleepResult:
        """Wake parts up, or all parts if `parts` is None. Cancels the front end's own `drain`.

        Raises:
            RequestError: there is not enough memory.
        """
        before, began = self._memory.measure(), perf_counter()
        self.stop_draining(client)
        warning = self._states.wake(parts)
        return self._result(before, began, warning)

    def weights_written(self) -> None:
        """Update the pause after weights were written."""
        self._states.weights_written()

    @property
    def _num_unfinished(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    def _result(self, before: OwnedBytes, began: float, warning: str) -> SleepResult:
        seconds = perf_counter() - began
        report = SleepReport(
            before,
            self._memory.measure(),
            tuple(self._states.asleep.tags),
            self._memory.num_missing,
            self._num_unfinished,
            seconds,
        )
        logger.info("%s", warning or report)
        return SleepResult(report, warning)
