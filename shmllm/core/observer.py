"""Who hears of what an engine does: nobody, unless a trace is recorded.

Owns the list of what can be heard. It is called a few times in a request's life and thrice
a step, never for a token; a method that does nothing costs less than a test whether there
is somebody to call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.outputs.columns import FinishReason

if TYPE_CHECKING:
    from shmllm.core.plan import StepPlan
    from shmllm.core.request import Request


class Observer:
    """Hears everything and does nothing. Times are CLOCK_MONOTONIC in ns."""

    def queued(self, request: Request) -> None:
        """A request came to the scheduler."""

    def admitted(self, request: Request) -> None:
        """It got a row, for the first time or after it was preempted."""

    def preempted(self, request: Request) -> None:
        """It gave row and blocks back, and waits."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """It is over."""

    def rejected(self, client: int, number: int) -> None:
        """A front end's request was not taken."""

    def drained(self, began_ns: int, ended_ns: int) -> None:
        """What front ends sent was taken from their rings."""

    def stepped(self, plan: StepPlan, moments_ns: tuple[int, ...]) -> None:
        """A step ran. The moments: it began; schedule, prepare, execute, sample, apply ended."""

    def published(self, began_ns: int) -> None:
        """Its outputs were put into the rings, from `began_ns` until now."""


NOBODY = Observer()
