"""Who wants the engine to hold still, and how.

Owns the holds, one for each front end that asked; several may hold at once, and the engine
goes on when none does. Must not know how steps are run or requests are refused.
"""

from __future__ import annotations

from enum import Enum

from shmllm.errors import RequestError


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


class Holds:
    """The pauses that are in force, by front end."""

    def __init__(self) -> None:
        self._modes: dict[int, PauseMode] = {}

    def add(self, client: int, mode: PauseMode) -> None:
        """Pause, or pause in another way."""
        self._modes[client] = mode

    def drop(self, client: int) -> None:
        """The front end lets go, or is gone."""
        self._modes.pop(client, None)

    def __bool__(self) -> bool:
        return bool(self._modes)

    @property
    def is_frozen(self) -> bool:
        """Whether no step may be run."""
        return any(mode is not PauseMode.WAIT for mode in self._modes.values())

    @property
    def refuses_new(self) -> bool:
        """Whether no request may be added."""
        return PauseMode.WAIT in self._modes.values()
