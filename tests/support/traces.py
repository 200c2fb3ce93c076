"""Traces as tests see them: loaded from their file, and checked for what every trace has to be.

Knows Chrome's format and nothing of the code that writes it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class Request:
    """A request's life as the file has it."""

    facts: dict[str, Any]
    begin: int
    end: int = 0
    stages: list[tuple[str, int, int, dict[str, Any]]] = field(default_factory=list)

    def names(self) -> list[str]:
        return [name for name, *_ in self.stages]

    def prefilled(self) -> list[tuple[int, int]]:
        return [(f["from"], f["tokens"]) for name, _, _, f in self.stages if name == "prefill"]


@dataclass
class Trace:
    """A trace's file.

    Attributes:
        about: what it says of itself.
        lanes: by (pid, thread), slices as (begin, end, name, facts) in ns, in their order.
        arrows: (sender's pid, at, receiver's pid, at, name).
        requests: by id.
    """

    about: dict[str, Any]
    events: list[Event]
    lanes: dict[tuple[int, int], list[tuple[int, int, str, dict[str, Any]]]]
    arrows: list[tuple[int, int, int, int, str]]
    requests: dict[str, Request]

    def slices(self, name: str) -> list[tuple[int, int, str, dict[str, Any]]]:
        found = [each for lane in self.lanes.values() for each in lane]
        return [each for each in found if each[2] == name or each[2].startswith(name + " ")]

    def process_names(self) -> dict[int, str]:
        named = [e for e in self.events if e["ph"] == "M" and e["name"] == "process_name"]
        return {e["pid"]: e["args"]["name"] for e in named}


def load(path: Path) -> Trace:
    """Load a trace, and check what holds for all: see the functions below."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = content["traceEvents"]
    lanes = _lanes(events)
    trace = Trace(content["otherData"], events, lanes, _arrows(events, lanes), _requests(events))
    assert all(e["ts"] >= 0 for e in events)
    named = set(trace.process_names())
    assert named >= {e["pid"] for e in events}, "a process without a name"
    return trace


def _ns(event: Event, key: str = "ts") -> int:
    nanoseconds: int = round(event[key] * 1000)
    return nanoseconds


def _lanes(events: list[Event]) -> dict[tuple[int, int], list[Any]]:
    """Slices lie in each other or behind each other, and a parent comes before its children."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = _ns(event)
            slice_ = (begin, begin + _ns(event, "dur"), event["name"], event["args"])
            lanes[event["pid"], event["tid"]].append(slice_)
    for lane in lanes.values():
        open_slices: list[tuple[int, int, str, Any]] = []
        last_begin = 0
        for each in lane:
            begin, end, *_ = each
            assert begin >= last_begin
            last_begin = begin
            while open_slices and open_slices[-1][1] <= begin:
                open_slices.pop()
            assert not open_slices or end <= open_slices[-1][1], (open_slices[-1], each)
            open_slices.append(each)
    return dict(lanes)


def _arrows(events: list[Event], lanes: dict[tuple[int, int], list[Any]]) -> list[Any]:
    """Each begins and ends once, in a slice that begins there, and not before it began."""
    begins = {(t, b, n) for t, lane in lanes.items() for b, _, n, _ in lane}
    ends: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], "an arrow twice"
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys(), "an arrow with one end"
    arrows = []
    for number, s in ends["s"].items():
        f = ends["f"][number]
        assert f["bp"] == "e"
        assert s["name"] == f["name"]
        assert _ns(s) <= _ns(f), "received before it was sent"
        assert ((s["pid"], s["tid"]), _ns(s), f"send {s['name']}") in begins
        assert ((f["pid"], f["tid"]), _ns(f), f"receive {f['name']}") in begins
        arrows.append((s["pid"], _ns(s), f["pid"], _ns(f), s["name"]))
    return arrows


def _requests(events: list[Event]) -> dict[str, Request]:
    """Each life is there once, and its stages lie in it, one behind the other."""
    requests: dict[str, Request] = {}
    open_spans: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "request":
            continue
        number, at = event["id2"]["local"], _ns(event)
        stack = open_spans[number]
        if event["ph"] == "b":
            if not stack:
                assert number not in requests, f"{number} lives twice"
                requests[number] = Request(event["args"], at)
            stack.append(event)
            assert len(stack) <= 2
        elif event["ph"] == "e":
            begun = stack.pop()
            assert begun["name"] == event["name"]
            if stack:
                requests[number].stages.append((event["name"], _ns(begun), at, begun["args"]))
            else:
                requests[number].end = at
        else:
            requests[number].stages.append((event["name"], at, at, event["args"]))
    assert not any(open_spans.values()), "a span that does not end"
    for request in requests.values():
        at = request.begin
        for _, begin, end, _ in request.stages:
            assert at <= begin <= end
            at = end
        assert at <= request.end
    return requests
