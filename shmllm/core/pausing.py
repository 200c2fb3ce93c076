"""The pauses of an engine, by owner, and the effect of each pause.

A front end has at most one pause, and the engine has pauses of its own. Several pauses may be in
force at once, and the engine continues when none is in force. This module must not know how steps
are run or how requests are refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from shmllm.errors import RequestError


@dataclass(frozen=True, slots=True)
class Pause:
    """The effect of a pause.

    Attributes:
        is_frozen: the engine must not run a step.
        refusal: why the engine refuses new requests; an empty string if it queues them.
    """

    is_frozen: bool
    refusal: str = ""


class PauseMode(Enum):
    """
    ABORT   existing requests end at once, with reason "abort"; new requests wait
    WAIT    existing requests run to their end; new requests are refused
    KEEP    nothing runs; existing and new requests wait
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"

    @classmethod
    def of(cls, name: object) -> PauseMode:
        """The mode of this name.

        Raises:
            RequestError: no mode has this name.
        """
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
"""The effect of a front end's pause in each mode."""


class Pauses:
    """The pauses in force, by owner: the number of a front end, or a name of the engine's own."""

    def __init__(self) -> None:
        self._pauses: dict[Hashable, Pause] = {}

    def add(self, owner: Hashable, pause: Pause) -> None:
        """Put a pause in force. It replaces an earlier one of the same owner."""
        self._pauses[owner] = pause

    def drop(self, owner: Hashable) -> bool:
        """End the pause of an owner. Returns whether it had one."""
        return self._pauses.pop(owner, None) is not None

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._pauses

    def __bool__(self) -> bool:
        return bool(self._pauses)

    @property
    def is_frozen(self) -> bool:
        """Whether a pause forbids the engine to run steps."""
        return any(pause.is_frozen for pause in self._pauses.values())

    @property
    def refusal(self) -> str:
        """Why new requests are refused; an empty string if they are not."""
        return next((pause.refusal for pause in self._pauses.values() if pause.refusal), "")
