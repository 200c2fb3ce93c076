"""What of the engine is asleep, and what each call makes of that.

    level   falls asleep                        the weights
    0       scheduling
    1       scheduling, kv_cache, weights       are kept: elsewhere, or where they are
    2       scheduling, kv_cache, weights       are lost

    part         asleep                        awake again
    scheduling   no step is run                with its tag, or with the last of the two below
    kv_cache     cached prefixes are gone      empty
    weights      nobody may read or write      as they were if kept, else missing until written

A part that is asleep falls no deeper, but for kept weights, which level 2 loses. The engine is
fully awake when no part is asleep and no weight is missing. Until then a hold is in force.

Owns these rules and that hold. Must not know how memory is given back (`Memory` does it), nor
who asks; requests are the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shmllm.core.pausing import Pause, PauseMode, Pauses
from shmllm.errors import RequestError
from shmllm.outputs.sleep_report import TAGS, OwnedBytes, SleepState

HOLDER = "sleep"
DRAINING = Pause(False, "the engine falls asleep when what it has is done, and takes nothing new")
MEMORY = SleepState.KV_CACHE | SleepState.WEIGHTS


@dataclass(frozen=True, slots=True)
class Level:
    """
    Attributes:
        parts: what falls asleep.
        keeps_weights: whether they come back as they were.
    """

    parts: SleepState
    keeps_weights: bool


LEVELS = {
    0: Level(SleepState.SCHEDULING, keeps_weights=True),
    1: Level(SleepState.SCHEDULING | MEMORY, keeps_weights=True),
    2: Level(SleepState.SCHEDULING | MEMORY, keeps_weights=False),
}


class Memory(Protocol):
    """What a runner can give back."""

    @property
    def num_missing(self) -> int:
        """Weights that were lost and not written since."""

    def release(self, part: SleepState, keep: bool) -> None:
        """Give the pages of weights or KV cache back; with `keep` the contents return.

        Raises:
            RequestError: there is no room to keep them in; nothing changed.
        """

    def restore(self, part: SleepState) -> None:
        """Have them again, at the same addresses.

        Raises:
            RequestError: there is not enough memory; nothing changed.
        """

    def tidy(self) -> None:
        """Give back what was freed; called after `release`, and when all is awake."""

    def measure(self) -> OwnedBytes:
        """Bytes by owner, now."""


class Sleeping:
    """
    Args:
        holds: where the engine is held still.
        memory: what can be given back.

    Attributes:
        asleep: what is.
    """

    def __init__(self, pauses: Pauses, memory: Memory) -> None:
        self.asleep = SleepState(0)
        self._pauses = pauses
        self._memory = memory
        self._mode = PauseMode.ABORT
        self._are_weights_kept = True

    @property
    def state(self) -> SleepState:
        """What is asleep, and MISSING if weights are."""
        return self.asleep | SleepState.MISSING if self._memory.num_missing else self.asleep

    def drain(self, client: int) -> None:
        """Take no new requests until a front end's sleep begins, or it gives that up."""
        self._pauses.add((HOLDER, client), DRAINING)

    def stop_draining(self, client: int) -> None:
        """The front end's sleep begins now, was given up, or its front end is gone."""
        self._pauses.drop((HOLDER, client))

    def warning(self, level: Level) -> str:
        """What is odd about going to sleep now; empty if nothing is."""
        if not self._falls(level) and not self._loses(level):
            return f"the engine is asleep already: {', '.join(self.asleep.tags)}"
        return ""

    def sleep(self, level: Level, mode: PauseMode) -> None:
        """Fall asleep, or deeper. The caller has seen to the requests.

        Args:
            mode: KEEP queues new requests, the others refuse them; WAIT leaves that as it is
                if the engine is asleep already.

        Raises:
            RequestError: there is no room to keep the weights in; nothing changed.
        """
        falls, loses = self._falls(level), self._loses(level)
        if SleepState.WEIGHTS in falls or loses:
            self._memory.release(SleepState.WEIGHTS, level.keeps_weights)
            self._are_weights_kept = level.keeps_weights
        if SleepState.KV_CACHE in falls:
            self._memory.release(SleepState.KV_CACHE, keep=False)
        if not self.asleep or mode is not PauseMode.WAIT:
            self._mode = mode
        self.asleep |= falls
        self._settle()
        if falls & MEMORY or loses:
            self._memory.tidy()

    def wake(self, parts: SleepState | None) -> str:
        """Wake parts up, or None for all. Returns what is odd about that, empty if nothing is.

        Raises:
            RequestError: memory is short; what was not woken by then is still asleep.
        """
        sleeping = self.asleep if parts is None else parts & self.asleep
        warning = self._oddity(parts)
        try:
            for part in (SleepState.WEIGHTS, SleepState.KV_CACHE):
                if part in sleeping:
                    self._memory.restore(part)
                    self.asleep &= ~part
            self.asleep &= ~(sleeping & SleepState.SCHEDULING)
            if sleeping & MEMORY and not self.asleep & MEMORY:
                self.asleep = SleepState(0)
        finally:
            self._settle()
        return warning

    def weights_written(self) -> None:
        """Weights were; perhaps the last that were missing."""
        self._settle()

    def _falls(self, level: Level) -> SleepState:
        return level.parts & ~self.asleep

    def _loses(self, level: Level) -> bool:
        """Whether kept weights are lost."""
        is_kept = SleepState.WEIGHTS in self.asleep and self._are_weights_kept
        return is_kept and not level.keeps_weights

    def _oddity(self, parts: SleepState | None) -> str:
        if not self.asleep:
            words = "the engine is not asleep"
            return f"{words}, but {self._missing()}" if self._memory.num_missing else words
        if parts is not None and not parts:
            return "no tag was given: nothing was woken"
        awake = (parts or SleepState(0)) & ~self.asleep
        return f"not asleep: {', '.join(awake.tags)}" if awake else ""

    def _missing(self) -> str:
        return (
            f"{self._memory.num_missing:,} weights are missing since sleep(level=2): write them "
            'with load_weights, update_weights or collective_rpc("reload_weights")'
        )

    def _settle(self) -> None:
        """Have the hold say what is so. What writing weights has freed goes when nothing holds."""
        if self.asleep:
            refusal = f"the engine sleeps ({', '.join(self.asleep.tags)}): call wake_up() first"
            if self._mode is PauseMode.KEEP:
                refusal = ""
            self._pauses.add(HOLDER, Pause(True, refusal))
        elif self._memory.num_missing:
            self._pauses.add(HOLDER, Pause(True, self._missing()))
        elif self._pauses.drop(HOLDER):
            self._memory.tidy()


def level_of(number: object) -> Level:
    """The level. Raises RequestError."""
    if type(number) is not int or number not in LEVELS:
        raise RequestError(f"the level of a sleep is 0, 1 or 2, got {number!r}")
    return LEVELS[number]


def parts_of(tags: object) -> SleepState | None:
    """What tags name; None for None, which is everything. Raises RequestError."""
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
