"""Who wants the engine to hold still, and how.

Owns the holds: one for each front end that asked, and those of the engine itself; several
may be in force at once, and the engine goes on when none is. Must not know how steps are
run or requests are refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from shmllm.errors import RequestError


@dataclass(frozen=True, slots=True)
class Pause:
    """What holding still means.

    Attributes:
        is_frozen: no step may be run.
        refusal: why no request may be added; empty where they are queued.
    """

    is_frozen: bool
    refusal: str = ""


class PauseMode(Enum):
    """
    ABORT   what there is ends at once, with reason "abort"; what comes waits
    WAIT    what there is runs to its end; what comes is refused
    KEEP    nothing runs; what there is and what comes waits
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"

    @classmethod
    def of(cls, name: object) -> PauseMode:
        """The mode called `name`. Raises RequestError."""
        for mode in cls:
            if mode.value == name:
                return mode
        names = ", ".join(repr(mode.value) for mode in cls)
        raise RequestError(f"the mode of a pause is one of {names}, got {name!r}")


PAUSES = {
    PauseMode.ABORT: Pause(is_frozen=True),
    PauseMode.WAIT: Pause(False, "the engine is paused and takes no new requests: try again"),
    PauseMode.KEEP: Pause(is_frozen=True),
}
"""What each mode means for a front end's pause."""


class Pauses:
    """Those in force, by holder: the number of a front end, or a name of the engine's own."""

    def __init__(self) -> None:
        self._pauses: dict[Hashable, Pause] = {}

    def add(self, holder: Hashable, hold: Pause) -> None:
        """Hold still, or in another way."""
        self._pauses[holder] = hold

    def drop(self, holder: Hashable) -> bool:
        """The holder lets go, or is gone. Returns whether it held anything."""
        return self._pauses.pop(holder, None) is not None

    def __bool__(self) -> bool:
        return bool(self._pauses)

    @property
    def is_frozen(self) -> bool:
        """Whether no step may be run."""
        return any(hold.is_frozen for hold in self._pauses.values())

    @property
    def refusal(self) -> str:
        """Why no request may be added; empty if it may."""
        return next((hold.refusal for hold in self._pauses.values() if hold.refusal), "")
