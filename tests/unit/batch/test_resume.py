"""Resuming a job gives the records of an uninterrupted job, wherever the output was cut."""

from __future__ import annotations

import json

import pytest
from support.batch_helpers import FakeStream, json_rows, records, run_job, write_rows

from shmllm.batch.native import NativeFormat
from shmllm.batch.output import Mode
from shmllm.batch.resume import DoneLines
from shmllm.errors import RequestError

ROWS = [
    {"id": "a", "prompt": "one"},
    "",
    {"id": "b", "prompt": "two", "k": [1, float("nan")]},
    "not JSON",
    {"prompt": "three"},
    {"id": "\ud800", "prompt": "four"},
    {"id": None, "prompt": 5},
    {"id": "e", "prompt": "six", "sampling_params": {"temprature": 1}},
]
LINES_WITH_ROWS = {1, 3, 4, 5, 6, 7, 8}


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def whole(source, tmp_path):
    """The records of an uninterrupted job, in random order."""
    target = tmp_path / "whole.jsonl"
    run_job(json_rows(source), target)
    return target


def as_set(path):
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    assert len(set(lines)) == len(lines)
    return set(lines)


def test_a_whole_job_has_every_row_once(whole):
    assert sorted(record["line"] for record in records(whole)) == sorted(LINES_WITH_ROWS)
    assert sum("error" in record for record in records(whole)) == 3


@pytest.mark.parametrize("ordered", [False, True])
def test_a_cut_at_any_byte_gives_the_rows_of_a_whole_job(source, whole, tmp_path, ordered):
    content = whole.read_bytes()
    for size in range(len(content) + 1):
        target = tmp_path / f"cut_{size}.jsonl"
        target.write_bytes(content[:size])
        run_job(json_rows(source), target, mode=Mode.RESUME, ordered=ordered)
        assert as_set(target) == as_set(whole)


def test_rows_with_a_record_are_not_run_again(source, whole):
    job = run_job(json_rows(source), whole, FakeStream(die_at=0), mode=Mode.RESUME)
    assert job.tally.num_written == 0


def test_repeated_deaths_of_the_stream_lose_and_repeat_no_row(source, whole, tmp_path):
    target = tmp_path / "out.jsonl"
    for seed in range(20):
        try:
            run_job(json_rows(source), target, FakeStream(die_at=1, seed=seed), mode=Mode.RESUME)
        except ConnectionError:
            continue
        break
    assert as_set(target) == as_set(whole)


def test_counts_are_those_of_the_file(source, whole):
    done = DoneLines(len(ROWS))
    done.read(str(whole), NativeFormat())
    assert (done.num_done, done.num_failed) == (7, 3)
    assert done.num_bytes == whole.stat().st_size
    assert {line for line in range(100) if line in done} == LINES_WITH_ROWS


def test_an_empty_file_holds_no_records(tmp_path):
    (tmp_path / "empty").touch()
    done = DoneLines(3)
    done.read(str(tmp_path / "empty"), NativeFormat())
    assert 1 not in done


GOOD = {"id": "a", "line": 1, "text": "eno"}
FOREIGN = {
    "no JSON": (["nonsense"], "line 1 of .* is not JSON"),
    "no record": ([GOOD, {"prompt": "x"}], "line 2 of .* is not a record of a batch job"),
    "out of range": ([{"line": 9, "text": ""}], "belongs to line 9 of the input, which has 8"),
    "twice": (
        [GOOD, GOOD],
        "line 2 of .* belongs to line 1 of the input, which already has a record",
    ),
    "another id": ([GOOD | {"id": "z"}], "record of line 1 has another id"),
    "no id": ([{"line": 1, "text": ""}], "record of line 1 has another id"),
    "another field": ([GOOD | {"k": 1}], "record of line 1 has another id or other fields"),
    "blank line": ([GOOD, {"line": 2, "text": ""}], "1 records belong to no row of"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_data_is_refused_and_unchanged(source, tmp_path, name):
    lines, words = FOREIGN[name]
    target = write_rows(tmp_path / "out.jsonl", lines)
    before = target.read_bytes()
    with pytest.raises(RequestError, match=words) as caught:
        run_job(json_rows(source), target, mode=Mode.RESUME)
    assert str(caught.value).startswith("cannot resume: ")
    assert target.read_bytes() == before


def test_memory_does_not_depend_on_the_size_of_the_records(tmp_path):
    target = tmp_path / "out.jsonl"
    with target.open("w") as out:
        for line in range(1, 1001):
            out.write(json.dumps({"line": line, "text": "x" * 1000, "id": str(line)}) + "\n")
    done = DoneLines(1000)
    done.read(str(target), NativeFormat())
    assert len(done._bits) + len(done._tags) * done._tags.itemsize < 5000
