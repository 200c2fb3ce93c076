"""Builds the steps of an engine, with begin and end of each phase, from its recording.

This module combines the records of one step. It must not know how steps are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from shmllm.tracing.layout import Slice, Type
from shmllm.tracing.reading import Record

PHASES = ("schedule", "prepare", "execute", "sample", "apply", "publish")
_HALF = 2**32 - 1


@dataclass
class TracedStep:
    """A completed step of an engine.

    Attributes:
        number: the number of the step.
        thread: the kernel's id of the thread that ran it.
        boundaries_ns: the begin of the step, and then the end of each of PHASES.
        num_requests: the number of requests in the batch.
        num_tokens: the number of computed tokens.
        num_draft_tokens: the number of drafted ones among them.
        running: the number of running requests after the step.
        waiting: the number of waiting requests after the step.
        blocks: the number of used KV blocks after the step.
    """

    number: int
    thread: int
    boundaries_ns: tuple[int, ...]
    num_requests: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0

    @property
    def begin_ns(self) -> int:
        return self.boundaries_ns[0]

    @property
    def end_ns(self) -> int:
        return self.boundaries_ns[-1]

    @property
    def planned_ns(self) -> int:
        """The end of schedule."""
        return self.boundaries_ns[1]

    @property
    def sampled_ns(self) -> int:
        """The end of sample, when the sampled tokens were known."""
        return self.boundaries_ns[4]

    @property
    def applied_ns(self) -> int:
        """The end of apply, when the requests had their new tokens."""
        return self.boundaries_ns[5]

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """(name, begin, end) of each phase."""
        for name, (begin_ns, end_ns) in zip(PHASES, pairwise(self.boundaries_ns), strict=True):
            yield name, begin_ns, end_ns


def steps_of(records: Iterable[Record]) -> dict[int, TracedStep]:
    """The completed steps in one engine's records, by number."""
    steps: dict[int, TracedStep] = {}
    last: TracedStep | None = None
    for record in records:
        if record.type == Type.PHASES:
            number, *inner_ns = record[5:]
            boundaries_ns = (record.begin_ns, *inner_ns, record.end_ns, record.end_ns)
            if sorted(boundaries_ns) == list(boundaries_ns):
                last = steps[number] = TracedStep(number, record.thread, boundaries_ns)
        elif record.type == Type.STEP and record.a in steps:
            step = steps[record.a]
            step.num_requests = record.b
            step.num_draft_tokens, step.num_tokens = record.c >> 32, record.c & _HALF
            step.running, step.waiting = record.d >> 32, record.d & _HALF
            step.blocks = record.e
        elif record.type == Type.SLICE and record.name == Slice.PUBLISH and last is not None:
            last.boundaries_ns = (
                *last.boundaries_ns[:-1],
                max(record.end_ns, last.boundaries_ns[-2]),
            )
            last = None
    return steps
