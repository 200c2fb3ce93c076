"""Steps of an engine out of its recording: when each phase began and ended.

Owns how the records of a step belong together. Must not know how steps are drawn.
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
    """
    Attributes:
        moments_ns: it began; then the end of each of PHASES. An engine that died in a step
            has not ended it: it is not here.
        num_requests: in its batch.
        num_tokens: computed.
        running: requests with a row when it was over.
        waiting: requests without.
        blocks: KV blocks in use.
    """

    number: int
    thread: int
    moments_ns: tuple[int, ...]
    num_requests: int = 0
    num_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0

    @property
    def begin_ns(self) -> int:
        return self.moments_ns[0]

    @property
    def end_ns(self) -> int:
        return self.moments_ns[-1]

    @property
    def planned_ns(self) -> int:
        """When it was known what it computes."""
        return self.moments_ns[1]

    @property
    def sampled_ns(self) -> int:
        """When its tokens were there."""
        return self.moments_ns[4]

    @property
    def applied_ns(self) -> int:
        """When its requests had them."""
        return self.moments_ns[5]

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """(name, begin, end) of each."""
        for name, (begin_ns, end_ns) in zip(PHASES, pairwise(self.moments_ns), strict=True):
            yield name, begin_ns, end_ns


def steps_of(records: Iterable[Record]) -> dict[int, TracedStep]:
    """The steps of one engine, by number."""
    steps: dict[int, TracedStep] = {}
    last: TracedStep | None = None
    for record in records:
        if record.type == Type.PHASES:
            number, *inner_ns = record[5:]
            moments_ns = (record.begin_ns, *inner_ns, record.end_ns, record.end_ns)
            if sorted(moments_ns) == list(moments_ns):
                last = steps[number] = TracedStep(number, record.thread, moments_ns)
        elif record.type == Type.STEP and record.a in steps:
            step = steps[record.a]
            step.num_requests, step.num_tokens = record.b, record.c
            step.running, step.waiting = record.d >> 32, record.d & _HALF
            step.blocks = record.e
        elif record.type == Type.SLICE and record.name == Slice.PUBLISH and last is not None:
            last.moments_ns = (*last.moments_ns[:-1], max(record.end_ns, last.moments_ns[-2]))
            last = None
    return steps
