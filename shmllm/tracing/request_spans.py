"""Builds a span for each request from the recordings of all processes.

This module combines the events that an engine and a front end recorded for one request into one
span of consecutive stages. It must not know how spans are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shmllm.tracing.layout import REASONS, Event, Type
from shmllm.tracing.reading import Record, Recording
from shmllm.tracing.steps import TracedStep, steps_of

UNANSWERED = ("abort", "error")
"""Ends of which a front end need not record anything: it aborted the request, or has gone."""

STAGE_EVENTS = frozenset({Event.ADMITTED, Event.PREFILL, Event.PREEMPTED, Event.REJECTED})


@dataclass(frozen=True)
class Stage:
    """A part of a request's span; an instant if its begin equals its end.

    Attributes:
        facts: values to show with the stage, by name.
    """

    name: str
    begin_ns: int
    end_ns: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RequestSpan:
    """The time from a request's arrival to its end, divided into stages.

    Attributes:
        connection: the connection of its front end.
        number: the front end's number of the request.
        begin_ns: its arrival, or the begin of the trace.
        end_ns: its end, or the end of the trace.
        stages: the stages in order; each begins at or after the end of the one before.
        reason: the finish reason; "" if the trace has no end of the request.
        is_whole: whether the trace has its beginning and its end, in the front end too if that
            was traced when it sent the request.
        num_prompt_tokens: the tokens of its prompt; 0 if the trace has no beginning.
        num_output_tokens: the tokens of its output; 0 if the trace has no end.
        num_cached_tokens: the prefix-cache hit in tokens; None if the trace does not have it.
        num_preemptions: the preemptions in the trace.
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
class _RequestEvents:
    """The events of one request from all recordings.

    Attributes:
        by_event: the first record of each Event.
        stage_events: the records of STAGE_EVENTS in order, each with the steps of its engine.
    """

    by_event: dict[int, Record] = field(default_factory=dict)
    stage_events: list[tuple[Record, Mapping[int, TracedStep]]] = field(default_factory=list)

    def add(self, record: Record, steps: Mapping[int, TracedStep]) -> None:
        self.by_event.setdefault(record.name, record)
        if record.name in STAGE_EVENTS:
            self.stage_events.append((record, steps))


@dataclass(frozen=True)
class TracedFrontEnd:
    """A front end in the recording of its engine.

    Attributes:
        connection: its connection to the engine.
        pid: its pid in its own pid namespace.
    """

    connection: int
    pid: int


def front_ends_of(recordings: Iterable[Recording]) -> dict[int, TracedFrontEnd]:
    """The front ends in the recordings of engines, by connection."""
    found = {}
    for recording in recordings:
        for record in recording.records:
            if record.type == Type.EVENT and record.name == Event.JOINED:
                found[record.b] = TracedFrontEnd(record.b, record.c)
    return found


def request_spans_of(
    recordings: Iterable[Recording], begin_ns: int, end_ns: int
) -> list[RequestSpan]:
    """The spans of all requests with recorded events, cut to the time of the trace and in the
    order of their begin."""
    events: dict[tuple[int, int], _RequestEvents] = {}
    for recording in recordings:
        _collect_events(recording, events)
    spans = [_span(*key, each, begin_ns, end_ns) for key, each in events.items()]
    return sorted(spans, key=lambda span: (span.begin_ns, span.number))


def _collect_events(recording: Recording, events: dict[tuple[int, int], _RequestEvents]) -> None:
    """Add a recording's events, by (connection, request number). An engine's recording names a
    front end by its place, which several front ends can have one after the other."""
    steps = steps_of(recording.records)
    places: dict[int, int] = {}
    for record in recording.records:
        if record.type != Type.EVENT:
            continue
        if record.name == Event.JOINED:
            places[record.a] = record.b
        elif record.name == Event.LEFT:
            places.pop(record.a, None)
        else:
            by_front_end = record.name >= Event.SUBMITTED
            connection = record.a if by_front_end else places.get(record.a)
            if connection is not None:
                key = connection, record.b
                events.setdefault(key, _RequestEvents()).add(record, steps)


def _span(
    connection: int, number: int, events: _RequestEvents, begin_ns: int, end_ns: int
) -> RequestSpan:
    span = RequestSpan(connection, number)
    found = events.by_event
    submitted, queued = found.get(Event.SUBMITTED), found.get(Event.QUEUED)
    ended = found.get(Event.ENDED) or found.get(Event.REJECTED)
    finished = found.get(Event.FINISHED)
    first = submitted or queued
    span.begin_ns = max(first.end_ns if first else begin_ns, begin_ns)
    if first is not None:
        span.num_prompt_tokens = first.c
    last = finished or found.get(Event.DISCARDED) or ended
    span.end_ns = max((r.end_ns for r in (last, ended) if r is not None), default=end_ns)
    is_delivered = (
        submitted is None or last is not ended or _reason(None, ended, False) in UNANSWERED
    )
    span.is_whole = (
        first is not None and first.end_ns >= begin_ns and last is not None and is_delivered
    )
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
    engine_stages = _EngineStages(span, stages)
    for record, steps in events.stage_events:
        engine_stages.add(record, steps)
    if Event.REJECTED not in found:
        engine_stages.close(computed_until)
    if finished is not None:
        stages.add("detokenize", finished.begin_ns, finished.end_ns)
    if span.reason:
        at_ns = finished.end_ns if finished is not None else span.end_ns
        stages.add("finished", at_ns, at_ns, {"reason": span.reason})
    span.stages = stages.found
    return span


def _reason(finished: Record | None, ended: Record | None, is_discarded: bool) -> str:
    """The finish reason. The front end's record wins, because the engine records an abort for a
    request that the front end ended at a stop string."""
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
    """Consecutive stages: a stage that would begin before the end of the last one is cut."""

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


class _EngineStages:
    """Builds the stages of a request in the engine: queued, prefill chunks, decode, preempted.

    Args:
        span: gets the prefix-cache hit and the number of preemptions.
        stages: gets the stages; the first one begins at the current end of `stages`.
    """

    def __init__(self, span: RequestSpan, stages: _Stages) -> None:
        self._span = span
        self._stages = stages
        self._waiting = "queued"
        self._since_ns = stages.at_ns
        self._has_first_token = False
        self._is_in_prompt = False

    def add(self, record: Record, steps: Mapping[int, TracedStep]) -> None:
        """Process the next event."""
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
        """End the current stage."""
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
