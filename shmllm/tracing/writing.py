"""Writes a timeline as JSON, and summarises it in a few lines.

This module owns the file format and the text of the summary. It must not know how the timeline
was built.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from shmllm.tracing.layout import Slice, Type
from shmllm.tracing.reading import Recording
from shmllm.tracing.steps import PHASES, TracedStep
from shmllm.tracing.timeline import Timeline

HOW_TO_OPEN = "open it at https://ui.perfetto.dev (it stays on your machine) or chrome://tracing"


def write_timeline(timeline: Timeline, path: Path, about: dict[str, Any]) -> int:
    """Write a timeline to a file; the suffix .gz compresses it.

    Args:
        timeline: the timeline.
        path: the path of the file.
        about: further values for the file's `otherData`.

    Returns:
        The number of events.
    """
    with _open(path) as file:
        file.write('{"displayTimeUnit": "ns", "otherData": ')
        json.dump(about | _about(timeline), file)
        file.write(', "traceEvents": [')
        num_events = 0
        for event in timeline.events():
            file.write(",\n" if num_events else "\n")
            file.write(json.dumps(event))
            num_events += 1
        file.write("\n]}\n")
    return num_events


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=4)
    return path.open("w", encoding="utf-8")


def _about(timeline: Timeline) -> dict[str, Any]:
    return {
        "clock": "CLOCK_MONOTONIC",
        "origin_ns": timeline.begin_ns,
        "processes": [
            {"pid": r.pid, "dropped_records": r.num_dropped, **r.facts} for r in timeline.recordings
        ],
        "dropped_records": timeline.num_dropped,
        "front_ends_not_recorded": [each.pid for each in timeline.unseen_front_ends()],
        "ring_records_with_one_end": timeline.num_unpaired,
    }


def summary(timeline: Timeline, path: Path, num_events: int) -> Iterator[str]:
    """Lines for a person: the amount of recorded data, the time of each phase, how to open it."""
    num_steps = sum(map(len, timeline.steps.values()))
    span_s = (timeline.end_ns - timeline.begin_ns) / 1e9
    yield (
        f"{path}: {_counted(num_events, 'event')} of "
        f"{_counted(len(timeline.recordings), 'process', 'processes')} in {span_s:.2f} s; "
        f"{_counted(num_steps, 'step')}, {_counted(len(timeline.requests), 'request')}"
        f"{_endings(timeline)}"
    )
    if num_steps:
        yield from _phase_table(timeline)
    for recording in timeline.recordings:
        yield from _rank_table(recording, timeline.begin_ns)
    yield from _warnings(timeline)
    yield HOW_TO_OPEN


def _counted(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: "1 step", "2 steps"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _endings(timeline: Timeline) -> str:
    reasons = Counter(request.reason or "not ended" for request in timeline.requests)
    return f" ({', '.join(f'{n:,} {reason}' for reason, n in reasons.most_common())})" * bool(
        reasons
    )


def _phase_table(timeline: Timeline) -> Iterator[str]:
    """The time of each phase, summed over all engines, and of the front ends' activities."""
    spent = Counter[str]()
    for steps in timeline.steps.values():
        for step in steps.values():
            for name, begin_ns, end_ns in step.phases():
                spent[name] += end_ns - begin_ns
    engine = ("drain", *PHASES)
    others = ("tokenize", "process outputs")
    for span in timeline.spans:
        if span.name in ("drain", *others):
            spent[span.name] += span.end_ns - span.begin_ns
    num_steps = sum(map(len, timeline.steps.values()))
    total_ns = sum(spent[name] for name in engine)
    window_ns = sum(_window_ns(steps.values()) for steps in timeline.steps.values())
    yield f"{'engine':<18}{'ms':>12}{'share':>8}{'us a step':>12}"
    for name in engine:
        yield (
            f"  {name:<16}{spent[name] / 1e6:>12,.2f}{spent[name] / total_ns:>8.1%}"
            f"{spent[name] / num_steps / 1e3:>12,.1f}"
        )
    yield f"  {'(else)':<16}{max(window_ns - total_ns, 0) / 1e6:>12,.2f}  mostly waiting"
    yield "front end"
    for name in others:
        yield f"  {name:<16}{spent[name] / 1e6:>12,.2f}"


def _rank_table(recording: Recording, begin_ns: int) -> Iterator[str]:
    """The time that a process that computes with an engine spent in steps, or in their launches."""
    steps = [
        record
        for record in recording.records
        if record.type == Type.SLICE
        and record.name in (Slice.RANK_STEP, Slice.RANK_LAUNCH)
        and record.begin_ns >= begin_ns
    ]
    total_ns = sum(step.end_ns - step.begin_ns for step in steps)
    if not total_ns:
        return
    waited_ns = sum(step.b for step in steps)
    spent = {"compute": total_ns - waited_ns, "wait for others": waited_ns}
    if steps[0].name == Slice.RANK_LAUNCH:
        spent = {"launch": total_ns}
    yield f"{recording.facts['role']}, pid {recording.pid}"
    for name, spent_ns in spent.items():
        yield (
            f"  {name:<16}{spent_ns / 1e6:>12,.2f}{spent_ns / total_ns:>8.1%}"
            f"{spent_ns / len(steps) / 1e3:>12,.1f}"
        )


def _window_ns(steps: Collection[TracedStep]) -> int:
    """The time from the begin of an engine's first step to the end of its last step."""
    return max(step.end_ns for step in steps) - min(step.begin_ns for step in steps)


def _warnings(timeline: Timeline) -> Iterator[str]:
    if timeline.num_dropped:
        yield (
            f"{timeline.num_dropped:,} records found no room and are missing: trace for a "
            "shorter time, or with a larger --buffer"
        )
    unseen = timeline.unseen_front_ends()
    if unseen:
        pids = ", ".join(str(each.pid) for each in unseen)
        yield f"recorded by the engine alone, not by themselves: front ends {pids}"
