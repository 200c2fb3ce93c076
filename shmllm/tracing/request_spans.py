"""Requests' lives out of the recordings of all processes.

Owns how what an engine and a front end say of one request becomes one life: stages one
behind the other. Must not know how lives are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shmllm.tracing.layout import REASONS, Event, Type
from shmllm.tracing.reading import Record, Recording
from shmllm.tracing.steps import TracedStep, steps_of

MID_SPAN = frozenset({Event.ADMITTED, Event.PREFILL, Event.PREEMPTED, Event.REJECTED})


@dataclass(frozen=True)
class Stage:
    """A part of a life; an instant if it ends as it begins."""

    name: str
    begin_ns: int
    end_ns: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RequestSpan:
    """
    Attributes:
        connection: of its front end.
        number: what its front end calls it.
        stages: in order; none begins before the one before it ends.
        reason: why it ended; empty if it goes on behind the trace.
        is_whole: the trace has its beginning and its end.
        num_cached_tokens: of the prompt, which the prefix cache had; None if not seen.
    """

    connection: int
    number: int
    begin_ns: int = 0
    end_ns: int = 0
    stages: list[Stage] = field(default_factory=list)
    reason: str = ""
    is_whole: bool = False
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0


@dataclass
class _Notes:
    """What was recorded of one request, by whom."""

    moments: list[tuple[Record, Mapping[int, TracedStep]]] = field(default_factory=list)
    by_moment: dict[int, Record] = field(default_factory=dict)

    def add(self, record: Record, steps: Mapping[int, TracedStep]) -> None:
        self.by_moment.setdefault(record.name, record)
        if record.name in MID_SPAN:
            self.moments.append((record, steps))


@dataclass(frozen=True)
class TracedFrontEnd:
    """A front end as its engine saw it.

    Attributes:
        connection: of it to this engine.
        pid: its own, in its namespace.
        engine_pid: the engine.
    """

    connection: int
    pid: int
    engine_pid: int


def front_ends_of(recordings: Iterable[Recording]) -> dict[int, TracedFrontEnd]:
    """The front ends that engines had, by connection."""
    found = {}
    for recording in recordings:
        for record in recording.records:
            if record.type == Type.MOMENT and record.name == Event.JOINED:
                found[record.b] = TracedFrontEnd(record.b, record.c, recording.pid)
    return found


def request_spans_of(
    recordings: Iterable[Recording], begin_ns: int, end_ns: int
) -> list[RequestSpan]:
    """All lives of which something was seen between these times, in the order they began."""
    notes: dict[tuple[int, int], _Notes] = {}
    for recording in recordings:
        _take_notes(recording, notes)
    spans = [_span(*key, each, begin_ns, end_ns) for key, each in notes.items()]
    return sorted(spans, key=lambda span: (span.begin_ns, span.number))


def _take_notes(recording: Recording, notes: dict[tuple[int, int], _Notes]) -> None:
    """An engine calls a front end by its place, which has another one when that is gone."""
    steps = steps_of(recording.records)
    places: dict[int, int] = {}
    for record in recording.records:
        if record.type != Type.MOMENT:
            continue
        if record.name == Event.JOINED:
            places[record.a] = record.b
        elif record.name == Event.LEFT:
            places.pop(record.a, None)
        else:
            by_front_end = record.name >= Event.SUBMITTED
            connection = record.a if by_front_end else places.get(record.a)
            if connection is not None:
                notes.setdefault((connection, record.b), _Notes()).add(record, steps)


def _span(connection: int, number: int, notes: _Notes, begin_ns: int, end_ns: int) -> RequestSpan:
    span = RequestSpan(connection, number)
    found = notes.by_moment
    submitted, queued = found.get(Event.SUBMITTED), found.get(Event.QUEUED)
    ended = found.get(Event.ENDED) or found.get(Event.REJECTED)
    finished = found.get(Event.FINISHED)
    first = submitted or queued
    span.begin_ns = max(first.end_ns if first else begin_ns, begin_ns)
    if first is not None:
        span.num_prompt_tokens = first.c
    last = finished or found.get(Event.DISCARDED) or ended
    span.end_ns = max((r.end_ns for r in (last, ended) if r is not None), default=end_ns)
    span.is_whole = first is not None and first.end_ns >= begin_ns and last is not None
    span.reason = _reason(finished, ended, Event.DISCARDED in found)
    for record in (ended, finished):
        if record is not None and record.name in (Event.ENDED, Event.FINISHED):
            span.num_output_tokens = record.d
    computed_until = finished.begin_ns if finished else span.end_ns
    if ended is not None:
        computed_until = min(computed_until, ended.begin_ns)
    stages = _Stages(span.begin_ns)
    if submitted is not None and queued is not None:
        stages.add("submit", submitted.end_ns, queued.end_ns)
    course = _Course(span, stages)
    for record, steps in notes.moments:
        course.follow(record, steps)
    if Event.REJECTED not in found:
        course.close(computed_until)
    if finished is not None:
        stages.add("detokenize", finished.begin_ns, finished.end_ns)
    if span.reason:
        at_ns = finished.end_ns if finished is not None else span.end_ns
        stages.add("finished", at_ns, at_ns, {"reason": span.reason})
    span.stages = stages.found
    return span


def _reason(finished: Record | None, ended: Record | None, is_discarded: bool) -> str:
    """The front end knows best: a stop string, which it finds, is an abort to its engine."""
    if finished is not None:
        return REASONS[finished.c] if finished.c < len(REASONS) else str(finished.c)
    if is_discarded:
        return "abort"
    if ended is None:
        return ""
    if ended.name == Event.REJECTED:
        return "error"
    return REASONS[ended.c] if ended.c < len(REASONS) else str(ended.c)


class _Stages:
    """Stages one behind the other: one that would reach back is cut."""

    def __init__(self, begin_ns: int) -> None:
        self.found: list[Stage] = []
        self.at_ns = begin_ns

    def add(
        self, name: str, begin_ns: int, end_ns: int, facts: Mapping[str, Any] | None = None
    ) -> None:
        begin_ns = max(begin_ns, self.at_ns)
        end_ns = max(end_ns, begin_ns)
        self.found.append(Stage(name, begin_ns, end_ns, facts or {}))
        self.at_ns = end_ns


class _Course:
    """What the engine did with a request: queued, chunks, decode, perhaps preempted and again.

    Args:
        life: gets what is seen of it.
        stages: get the stages; the first begins where they stand.
    """

    def __init__(self, span: RequestSpan, stages: _Stages) -> None:
        self._span = span
        self._stages = stages
        self._waiting = "queued"
        self._since_ns = stages.at_ns
        self._has_first_token = False
        self._is_in_prompt = False

    def follow(self, record: Record, steps: Mapping[int, TracedStep]) -> None:
        """Take the next moment."""
        if record.name == Event.ADMITTED:
            self._admit(record)
        elif record.name == Event.PREEMPTED:
            self._span.num_preemptions += 1
            self.close(record.end_ns)
            self._waiting = "preempted"
            self._is_in_prompt = False
        elif record.name == Event.PREFILL and (step := steps.get(record.e)) is not None:
            self._prefill(record, step)

    def close(self, at_ns: int) -> None:
        """End the stage that it is in."""
        if at_ns > self._since_ns and not self._is_in_prompt:
            self._stages.add(self._waiting or "decode", self._since_ns, at_ns)
        self._since_ns = at_ns

    def _admit(self, record: Record) -> None:
        self.close(record.end_ns)
        self._waiting = ""
        if self._span.num_cached_tokens is None:
            self._span.num_cached_tokens = record.c

    def _prefill(self, record: Record, step: TracedStep) -> None:
        facts = {"step": record.e, "from": record.c, "tokens": record.d}
        self._stages.add("prefill", step.planned_ns, step.sampled_ns, facts)
        self._since_ns = step.applied_ns
        size = self._span.num_prompt_tokens
        self._is_in_prompt = record.c + record.d < size
        if record.c < size <= record.c + record.d and not self._has_first_token:
            self._has_first_token = True
            self._stages.add("first token", step.sampled_ns, step.sampled_ns)
