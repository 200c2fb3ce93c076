"""Pausing an engine from a front end: `LLM`'s methods for it, and the steps of it, for whoever
waits between them otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shmllm.frontend.dispatcher import Dispatcher
from shmllm.wire.messages import Method

PauseMode = Literal["abort", "wait", "keep"]

PUMP_S = 0.1


def pause(dispatcher: Dispatcher, mode: PauseMode, clear_cache: bool) -> Iterator[None]:
    """Pause; yields as often as it has to be waited for requests to end."""
    while dispatcher.call(Method.PAUSE, mode) and mode == "wait":
        yield
    if clear_cache:
        dispatcher.call(Method.RESET_PREFIX_CACHE, mode == "keep")


def resume(dispatcher: Dispatcher) -> bool:
    """End this front end's pause. Returns whether the engine goes on."""
    return bool(dispatcher.call(Method.RESUME))


class PauseMethods:
    """What `LLM` inherits."""

    _dispatcher: Dispatcher

    def get_metrics(self) -> dict[str, int]:
        raise NotImplementedError

    def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Have the engine hold still, to change weights for instance, until
        `resume_generation`.

        Args:
            mode: "abort" ends what runs, with reason "abort"; "wait" returns when what runs
                has ended, and new requests are refused with EnginePausedError; "keep"
                freezes what runs, which goes on later. But with "wait", new requests are
                queued, so a `generate` of the thread that has to resume would not return.
            clear_cache: forget cached prefixes, too. What is frozen is then recomputed.
        """
        for _ in pause(self._dispatcher, mode, clear_cache):
            self._dispatcher.pump(PUMP_S)

    def resume_generation(self) -> bool:
        """End this front end's pause. Returns whether the engine goes on: another front end
        may have paused it, too."""
        return resume(self._dispatcher)

    def is_paused(self) -> bool:
        """Whether a front end has paused the engine, or it sleeps."""
        return bool(self.get_metrics()["paused"])
