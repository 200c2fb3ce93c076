"""Timelines built from recordings that the tests write by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.traces import Trace, load

from shmllm.tracing.layout import Direction, Event, RankStep, Slice, Type
from shmllm.tracing.reading import Record, Recording
from shmllm.tracing.timeline import make_timeline
from shmllm.tracing.writing import summary, write_timeline

FRONT, ENGINE, RANK, RING = 10, 20, 30, 0xABC
STOP, ABORT = 1, 3


def record(thread: int, type_: int, name: int, begin: int, end: int, *values: int) -> Record:
    return Record(type_, name, thread, begin, end, *(*values, 0, 0, 0, 0, 0)[:5])


def front(*records: tuple[int, ...]) -> Recording:
    return Recording(FRONT, {"role": "front end"}, 0, [record(FRONT, *r) for r in records])


def engine(*records: tuple[int, ...]) -> Recording:
    joined = (Type.EVENT, Event.JOINED, 100, 100, 0, RING, FRONT)
    each = [record(ENGINE, *r) for r in (joined, *records)]
    return Recording(ENGINE, {"role": "engine"}, 0, each)


def rank(*records: tuple[int, ...]) -> Recording:
    return Recording(RANK, {"role": "rank 1"}, 0, [record(RANK, *r) for r in records])


def event(what: Event, at: int, *values: int, until: int = 0) -> tuple[int, ...]:
    return (Type.EVENT, what, at, until or at, *values)


def written(tmp_path: Path, *recordings: Recording, begin: int = 0, **more: set[int]) -> Trace:
    timeline = make_timeline(list(recordings), begin, {5: "ADD"}, **more)
    num_events = write_timeline(timeline, tmp_path / "trace.json", {})
    trace = load(tmp_path / "trace.json")
    assert len(trace.events) == num_events
    assert all(isinstance(line, str) for line in summary(timeline, Path("x"), num_events))
    return trace


def test_an_arrow_connects_the_send_and_the_receipt_of_a_record(tmp_path: Path) -> None:
    sent = (Type.SENT, 5, 1000, 1500, RING, 64, 40, Direction.REQUESTS)
    received = (Type.RECEIVED, 5, 1400, 1900, RING, 64, 40, Direction.REQUESTS)
    other_way = (Type.SENT, 5, 2000, 2100, RING, 64, 40, Direction.OUTPUTS)
    trace = written(tmp_path, front(sent), engine(received, other_way))
    assert trace.arrows == [(FRONT, 1000, ENGINE, 1400, "ADD")]
    assert trace.about["ring_records_with_one_end"] == 1
    (slice_,) = trace.slices("receive ADD")
    assert slice_[3] == {"ring": "abc requests", "position": 64, "bytes": 40}


def test_a_parent_precedes_a_child_with_the_same_times(tmp_path: Path) -> None:
    """A trace file needs parents before children, but a recording has them after."""
    inner = (Type.RECEIVED, 5, 1000, 1500, RING, 64, 40, Direction.REQUESTS)
    outer = (Type.SLICE, Slice.DRAIN, 1000, 1500)
    trace = written(tmp_path, engine(inner, outer))
    assert [name for *_, name, _ in trace.lanes[ENGINE, ENGINE]] == ["drain", "receive ADD"]


def test_a_stop_string_ends_a_request_before_its_engine_knows(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        front(
            event(Event.SUBMITTED, 1000, RING, 7, 3),
            event(Event.FINISHED, 5000, RING, 7, STOP, 2, until=5100),
        ),
        engine(
            event(Event.QUEUED, 1100, 0, 7, 3),
            event(Event.ADMITTED, 1200, 0, 7, 0),
            event(Event.ENDED, 6000, 0, 7, ABORT, 3),
        ),
    )
    (request,) = trace.requests.values()
    assert request.names() == ["submit", "queued", "decode", "detokenize", "finished"]
    assert request.facts["finish reason"] == "stop"
    assert request.facts["output tokens"] == 2
    assert request.stages[2][2] == 5000
    assert request.end == 6000


def test_a_span_without_its_end_lasts_until_the_end_of_the_trace(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        engine(event(Event.QUEUED, 1100, 0, 7, 3), (Type.SLICE, Slice.DRAIN, 1000, 9000)),
    )
    (request,) = trace.requests.values()
    assert (request.begin, request.end) == (1100, 9000)
    assert request.facts["whole"] is False
    assert request.facts["finish reason"] == "not in the trace"


@pytest.mark.parametrize(("reason", "is_whole"), [(STOP, False), (ABORT, True)])
def test_a_trace_that_stops_before_the_front_end_has_the_end(
    reason: int, is_whole: bool, tmp_path: Path
) -> None:
    trace = written(
        tmp_path,
        front(event(Event.SUBMITTED, 1000, RING, 7, 3)),
        engine(
            event(Event.QUEUED, 1100, 0, 7, 3),
            event(Event.ADMITTED, 1200, 0, 7, 0),
            event(Event.ENDED, 6000, 0, 7, reason, 3),
        ),
    )
    (request,) = trace.requests.values()
    assert request.facts["whole"] is is_whole


def test_the_timeline_begins_with_the_trace(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        engine(
            (Type.SLICE, Slice.DRAIN, 500, 900),
            (Type.SLICE, Slice.DRAIN, 2000, 2100),
            event(Event.QUEUED, 600, 0, 7, 3),
        ),
        begin=1000,
    )
    (request,) = trace.requests.values()
    assert request.begin == 0
    assert [begin for begin, *_ in trace.slices("drain")] == [1000]


def test_a_place_can_have_two_front_ends_one_after_the_other(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        engine(
            event(Event.QUEUED, 1000, 0, 7, 3),
            event(Event.ENDED, 1100, 0, 7, ABORT, 0),
            event(Event.LEFT, 1200, 0),
            event(Event.QUEUED, 1250, 0, 7, 3),  # the place has no front end
            event(Event.JOINED, 1300, 0, RING + 1, FRONT + 1),
            event(Event.QUEUED, 1400, 0, 7, 3),
        ),
    )
    assert sorted(trace.requests) == [f"{RING:x}.7", f"{RING + 1:x}.7"]


def test_a_front_end_without_a_recording_is_named(tmp_path: Path) -> None:
    trace = written(tmp_path, engine(event(Event.QUEUED, 1000, 0, 7, 3)))
    assert trace.process_names()[FRONT] == f"front end, not recorded, pid {FRONT}"
    assert trace.about["front_ends_not_recorded"] == [FRONT]


def test_the_tracer_s_own_rings_are_not_shown(tmp_path: Path) -> None:
    reply = (Type.SENT, 5, 2000, 2100, RING, 64, 40, Direction.OUTPUTS)
    trace = written(tmp_path, engine(reply), hidden={RING})
    assert not trace.slices("send")
    assert trace.process_names().keys() == {ENGINE}


def test_the_summary_names_dropped_records(tmp_path: Path) -> None:
    recording = front((Type.SLICE, Slice.TOKENIZE, 1, 2, 3))
    recording.num_dropped = 5
    timeline = make_timeline([recording], 0, {})
    lines = list(summary(timeline, tmp_path, write_timeline(timeline, tmp_path / "x", {})))
    assert any("5 records found no room" in line for line in lines)
    assert "of 1 process in" in lines[0]
    assert "0 steps, 0 requests" in lines[0]
    assert load(tmp_path / "x").about["dropped_records"] == 5


def test_another_rank_has_a_lane_with_its_steps_and_waits(tmp_path: Path) -> None:
    step, scoring = RankStep.STEP, RankStep.SCORING
    what = Type.SLICE, Slice.RANK_STEP
    earlier = (*what, 10, 40, 3, 5, step)
    recording = rank(earlier, (*what, 100, 400, 8, 60, step), (*what, 500, 600, 0, 40, scoring))
    trace = written(tmp_path, engine(), recording, begin=50)
    assert trace.lanes[RANK, RANK] == [
        (50, 350, "step 7", {"waited for others us": 0.06}),
        (450, 550, "logits for prompts, step", {"waited for others us": 0.04}),
    ]
    assert trace.process_names()[RANK] == "rank 1, pid 30"
    lines = [line.split() for line in summary(make_timeline([recording], 50, {}), Path("x"), 0)]
    table = lines[lines.index(["rank", "1,", "pid", "30"]) + 1 :]
    assert [line[-2:] for line in table[:2]] == [["75.0%", "0.1"], ["25.0%", "0.1"]]


def test_a_rank_that_launches_steps_has_launches_and_no_waits(tmp_path: Path) -> None:
    recording = rank((Type.SLICE, Slice.RANK_LAUNCH, 100, 400, 8, 0, RankStep.STEP))
    trace = written(tmp_path, engine(), recording, begin=50)
    assert trace.lanes[RANK, RANK] == [(50, 350, "step 7", {})]
    lines = [line.split() for line in summary(make_timeline([recording], 50, {}), Path("x"), 0)]
    table = lines[lines.index(["rank", "1,", "pid", "30"]) + 1 :]
    assert table[0] == ["launch", "0.00", "100.0%", "0.3"]
    assert table[1][0] != "wait"


def test_a_compressed_trace_has_the_same_contents(tmp_path: Path) -> None:
    timeline = make_timeline([front((Type.SLICE, Slice.TOKENIZE, 1, 2, 3))], 0, {})
    for name in ("plain.json", "packed.json.gz"):
        write_timeline(timeline, tmp_path / name, {"pid": os.getpid()})
    assert load(tmp_path / "plain.json") == load(tmp_path / "packed.json.gz")
    assert (tmp_path / "packed.json.gz").read_bytes()[:2] == b"\x1f\x8b"
