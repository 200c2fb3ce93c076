"""Combines the recordings of all processes into one timeline in Chrome's trace event format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the
format; ui.perfetto.dev and chrome://tracing open it. This module owns the drawing: lanes, arrows,
counters and colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from shmllm.tracing.layout import Direction, RankStep, Slice, Type
from shmllm.tracing.reading import Record, Recording
from shmllm.tracing.request_spans import (
    RequestSpan,
    TracedFrontEnd,
    front_ends_of,
    request_spans_of,
)
from shmllm.tracing.steps import TracedStep, steps_of

TraceEvent = dict[str, Any]

NAMES = {
    Slice.START_ENGINE: "start engine",
    Slice.LOAD_TOKENIZER: "load tokenizer",
    Slice.TOKENIZE: "tokenize",
    Slice.PROCESS: "process outputs",
    Slice.IMPORT: "import",
    Slice.LOAD_MODEL: "load model",
    Slice.DRAIN: "drain",
}
RANK_STEPS: dict[int, str] = {
    RankStep.SCORING: "logits for prompts, ",
    RankStep.SHARING: "shared blocks, ",
}
FACTS = {
    Slice.TOKENIZE: ("prompts",),
    Slice.PROCESS: ("events", "requests changed", "requests finished"),
}
ORDER = {"engine": 1, "rank": 2, "stage": 2}
"""Behind which others a process is drawn, by the first word of its role."""
# Reserved colour names of chrome://tracing; Perfetto chooses its own colours.
COLOURS = {
    "schedule": "rail_response",
    "prepare": "rail_animation",
    "execute": "thread_state_running",
    "sample": "rail_load",
    "apply": "rail_idle",
    "publish": "generic_work",
    "queued": "grey",
    "prefill": "thread_state_iowait",
    "decode": "thread_state_running",
    "preempted": "terrible",
    "detokenize": "rail_response",
    "finished": "good",
}


class Span(NamedTuple):
    """A slice of a lane, which is the row of one thread.

    Attributes:
        facts: values to show with the slice, by name.
    """

    pid: int
    thread: int
    name: str
    begin_ns: int
    end_ns: int
    facts: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Timeline:
    """The contents of a trace.

    Attributes:
        begin_ns: the begin of the trace, the origin of all times in the file.
        end_ns: the end of the last record.
        spans: the slices of all lanes, each parent before its children.
        arrows: (record of the send, sender's pid, record of the receipt, receiver's pid) for each
            ring record of which both ends were recorded.
        num_unpaired: the number of ring records of which only one end was recorded.
        steps: the steps of each engine, by pid and number.
        requests: the spans of all requests.
        recordings: the recordings of all processes.
        front_ends: the front ends in the engines' recordings, by connection.
        kind_names: the names of the kinds of ring records.
    """

    begin_ns: int
    end_ns: int
    spans: list[Span]
    arrows: list[tuple[Record, int, Record, int]]
    num_unpaired: int
    steps: dict[int, dict[int, TracedStep]]
    requests: list[RequestSpan]
    recordings: list[Recording]
    front_ends: dict[int, TracedFrontEnd]
    kind_names: Mapping[int, str]

    @property
    def num_dropped(self) -> int:
        return sum(recording.num_dropped for recording in self.recordings)

    def events(self) -> Iterator[TraceEvent]:
        """All events for the `traceEvents` of the file."""
        yield from self._process_names()
        for span in self.spans:
            yield self._slice(span)
        for number, arrow in enumerate(self.arrows):
            yield from self._arrow(number, *arrow)
        for pid, steps in self.steps.items():
            for step in steps.values():
                yield from self._counters(pid, step)
        for request in self.requests:
            yield from self._request(request)

    def unseen_front_ends(self) -> list[TracedFrontEnd]:
        """The front ends with requests but without a recording of their own."""
        pids = {recording.pid for recording in self.recordings}
        active = {request.connection for request in self.requests}
        found = [self.front_ends[c] for c in sorted(active & self.front_ends.keys())]
        return [each for each in found if each.pid not in pids]

    def _process_names(self) -> Iterator[TraceEvent]:
        names = {r.pid: str(r.facts.get("role", "process")) for r in self.recordings}
        names |= {each.pid: "front end, not recorded" for each in self.unseen_front_ends()}
        for pid, name in names.items():
            order = ORDER.get(name.partition(" ")[0], 0)
            yield _metadata(pid, pid, "process_name", {"name": f"{name}, pid {pid}"})
            yield _metadata(pid, pid, "process_sort_index", {"sort_index": order})
        for pid, thread in sorted({(span.pid, span.thread) for span in self.spans}):
            role = names[pid] if pid == thread else f"{names[pid]}, thread {thread}"
            yield _metadata(pid, thread, "thread_name", {"name": role})
            yield _metadata(pid, thread, "thread_sort_index", {"sort_index": int(pid != thread)})

    def _slice(self, span: Span) -> TraceEvent:
        return _coloured(
            {
                "ph": "X",
                "name": span.name,
                "cat": "lane",
                "pid": span.pid,
                "tid": span.thread,
                "ts": self._us(span.begin_ns),
                "dur": (span.end_ns - span.begin_ns) / 1000,
                "args": dict(span.facts),
            }
        )

    def _arrow(
        self, number: int, sent: Record, sender: int, received: Record, receiver: int
    ) -> Iterator[TraceEvent]:
        name = self.kind_names.get(sent.name, f"kind {sent.name}")
        common = {"name": name, "cat": "ring", "id": number}
        begin, end = self._us(sent.begin_ns), self._us(received.begin_ns)
        yield common | {"ph": "s", "pid": sender, "tid": sent.thread, "ts": begin}
        yield common | {"ph": "f", "bp": "e", "pid": receiver, "tid": received.thread, "ts": end}

    def _counters(self, pid: int, step: TracedStep) -> Iterator[TraceEvent]:
        at = {"ph": "C", "pid": pid, "tid": step.thread, "ts": self._us(step.end_ns)}
        yield at | {"name": "requests", "args": {"running": step.running, "waiting": step.waiting}}
        yield at | {"name": "KV blocks", "args": {"used": step.blocks}}
        yield at | {"name": "tokens in step", "args": {"tokens": step.num_tokens}}

    def _request(self, span: RequestSpan) -> Iterator[TraceEvent]:
        front_end = self.front_ends.get(span.connection)
        pid = front_end.pid if front_end is not None else self._pid_of(span)
        common = {
            "cat": "request",
            "id2": {"local": f"{span.connection:x}.{span.number}"},
            "pid": pid,
            "tid": pid,
        }
        facts = {
            "prompt tokens": span.num_prompt_tokens,
            "cached tokens": span.num_cached_tokens,
            "output tokens": span.num_output_tokens,
            "finish reason": span.reason or "not in the trace",
            "preemptions": span.num_preemptions,
            "whole": span.is_whole,
        }
        name = f"request {span.number}"
        begin, end = self._us(span.begin_ns), self._us(span.end_ns)
        yield common | {"ph": "b", "name": name, "ts": begin, "args": facts}
        for stage in span.stages:
            event = common | {"name": stage.name, "ts": self._us(stage.begin_ns)}
            if stage.begin_ns == stage.end_ns:
                yield _coloured(event | {"ph": "n", "args": dict(stage.facts)})
                continue
            yield _coloured(event | {"ph": "b", "args": dict(stage.facts)})
            yield event | {"ph": "e", "ts": self._us(stage.end_ns)}
        yield common | {"ph": "e", "name": name, "ts": end}

    def _pid_of(self, span: RequestSpan) -> int:
        """The pid of the front end of a request whose engine has no recording."""
        for recording in self.recordings:
            if any(r.a == span.connection for r in recording.records if r.type == Type.EVENT):
                return recording.pid
        return 0

    def _us(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1000


def make_timeline(
    recordings: list[Recording],
    begin_ns: int,
    kind_names: Mapping[int, str],
    hidden: Iterable[int] = (),
) -> Timeline:
    """Combine recordings.

    Args:
        recordings: the recordings of all processes.
        begin_ns: the begin of the trace on CLOCK_MONOTONIC; earlier records are left out.
        kind_names: the names of the kinds of ring records.
        hidden: connections to leave out, such as the tracer's own.
    """
    recordings = [_without_hidden(recording, frozenset(hidden)) for recording in recordings]
    end_ns = max((r.end_ns for each in recordings for r in each.records), default=begin_ns)
    steps = {recording.pid: steps_of(recording.records) for recording in recordings}
    spans = [
        span
        for recording in recordings
        for span in _spans(recording, steps[recording.pid], kind_names)
        if span.begin_ns >= begin_ns
    ]
    spans.sort(key=lambda span: (span.pid, span.thread, span.begin_ns, -span.end_ns))
    arrows, num_unpaired = _arrows(recordings, begin_ns)
    return Timeline(
        begin_ns,
        end_ns,
        spans,
        arrows,
        num_unpaired,
        {pid: found for pid, found in steps.items() if found},
        request_spans_of(recordings, begin_ns, end_ns),
        recordings,
        front_ends_of(recordings),
        kind_names,
    )


def _without_hidden(recording: Recording, hidden: frozenset[int]) -> Recording:
    """A recording without the ring records and front ends of these connections. A hidden front end
    has no requests, so no event of a request has to be removed."""
    kept = [
        record
        for record in recording.records
        if not (
            (record.type in (Type.SENT, Type.RECEIVED) and record.a in hidden)
            or (record.type == Type.EVENT and record.b in hidden)
        )
    ]
    return Recording(recording.pid, recording.facts, recording.num_dropped, kept)


def _spans(
    recording: Recording, steps: Mapping[int, TracedStep], kind_names: Mapping[int, str]
) -> Iterator[Span]:
    """The slices of one recording. A parent precedes its children, even if both have the same
    begin and end: a process records the parent after its children, so this goes backwards."""
    pid = recording.pid
    for step in steps.values():
        facts = {"requests": step.num_requests, "tokens": step.num_tokens}
        if step.num_draft_tokens:
            facts["drafted"] = step.num_draft_tokens
        yield Span(pid, step.thread, f"step {step.number}", step.begin_ns, step.end_ns, facts)
        for name, begin_ns, end_ns in step.phases():
            if end_ns > begin_ns:
                yield Span(pid, step.thread, name, begin_ns, end_ns)
    for record in reversed(recording.records):
        if record.type in (Type.SENT, Type.RECEIVED):
            yield _ring_span(pid, record, kind_names)
        elif record.type == Type.SLICE and record.name in NAMES:
            what = Slice(record.name)
            facts = dict(zip(FACTS.get(what, ()), record[5:], strict=False))
            times = record.begin_ns, record.end_ns
            yield Span(pid, record.thread, NAMES[what], *times, facts)
        elif record.type == Type.SLICE and record.name in (Slice.RANK_STEP, Slice.RANK_LAUNCH):
            yield _rank_span(pid, record)


def _rank_span(pid: int, record: Record) -> Span:
    number = f" {record.a - 1}" if record.a else ""
    name = f"{RANK_STEPS.get(record.c, '')}step{number}"
    is_launch = record.name == Slice.RANK_LAUNCH
    facts = {} if is_launch else {"waited for others us": record.b / 1000}
    return Span(pid, record.thread, name, record.begin_ns, record.end_ns, facts)


def _ring_span(pid: int, record: Record, kind_names: Mapping[int, str]) -> Span:
    verb = "send" if record.type == Type.SENT else "receive"
    name = f"{verb} {kind_names.get(record.name, f'kind {record.name}')}"
    ring = f"{record.a:x} {Direction(record.d).name.lower()}"
    facts = {"ring": ring, "position": record.b, "bytes": record.c}
    return Span(pid, record.thread, name, record.begin_ns, record.end_ns, facts)


def _arrows(
    recordings: Iterable[Recording], begin_ns: int
) -> tuple[list[tuple[Record, int, Record, int]], int]:
    """(both ends of each ring record, number of ring records with only one recorded end)."""
    sent: dict[tuple[int, int, int], tuple[Record, int]] = {}
    received: dict[tuple[int, int, int], tuple[Record, int]] = {}
    for recording in recordings:
        for record in recording.records:
            if record.begin_ns >= begin_ns and record.type in (Type.SENT, Type.RECEIVED):
                ends = sent if record.type == Type.SENT else received
                ends[record.a, record.d, record.b] = (record, recording.pid)
    both = sent.keys() & received.keys()
    arrows = [(*sent[key], *received[key]) for key in both]
    arrows.sort(key=lambda arrow: arrow[0].begin_ns)
    return arrows, len(sent) + len(received) - 2 * len(both)


def _metadata(pid: int, thread: int, name: str, args: Mapping[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "tid": thread, "ts": 0, "args": dict(args)}


def _coloured(event: TraceEvent) -> TraceEvent:
    colour = COLOURS.get(event["name"])
    return event if colour is None else event | {"cname": colour}
