"""The interface through which an engine reports the events of its requests and steps.

A trace is an Observer; without a trace the engine calls `NULL_OBSERVER`, because a call of an
empty method costs less than a test for None. The engine calls an observer a few times for each
request and three times for each step, never for each token.
"""

from __future__ import annotations

from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.outputs.columns import FinishReason


class Observer:
    """An observer that ignores all events. All times are CLOCK_MONOTONIC in ns."""

    def queued(self, request: Request) -> None:
        """The request was added to the scheduler."""

    def admitted(self, request: Request) -> None:
        """The request got a row and blocks, for the first time or after a preemption."""

    def preempted(self, request: Request) -> None:
        """The request gave its row and blocks back and waits again."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """The request ended."""

    def rejected(self, client: int, number: int) -> None:
        """The engine rejected the request `number` of the front end `client`."""

    def drained(self, began_ns: int, ended_ns: int) -> None:
        """The engine read the records in the request rings."""

    def stepped(self, plan: StepPlan, moments_ns: tuple[int, ...]) -> None:
        """A step ran.

        Args:
            plan: the plan of the step.
            moments_ns: when the step began, and when its phases schedule, prepare, execute,
                sample and apply ended.
        """

    def published(self, began_ns: int) -> None:
        """The engine wrote the outputs of a step to the output rings, from `began_ns` until now."""


NULL_OBSERVER = Observer()
