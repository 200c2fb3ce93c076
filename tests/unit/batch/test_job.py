"""A job writes one record per row, as soon as it can, and in order if asked to."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_helpers import (
    IN_FLIGHT,
    FakeStream,
    answer,
    json_rows,
    prepare,
    records,
    run_job,
    write_rows,
)
from support.variants import slow

from shmllm.batch.job import BatchJob
from shmllm.batch.native import NativeFormat
from shmllm.batch.output import Mode, RecordFile
from shmllm.batch.parameters import make_params
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams


def mixed(num):
    """Rows of which every third is invalid."""
    return ["bad" if i % 3 == 1 else {"id": i, "prompt": f"p{i}"} for i in range(num)]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_written_once(tmp_path, target, seed):
    job = run_job(
        json_rows(write_rows(tmp_path / "in.jsonl", mixed(50))), target, FakeStream(seed=seed)
    )
    found = records(target)
    assert sorted(record["line"] for record in found) == list(range(1, 51))
    assert (job.tally.num_written, job.tally.num_failed) == (50, 17)
    assert all(r.get("text") == f"p{r['line'] - 1}"[::-1] for r in found if "error" not in r)


def test_ordered_records_are_in_the_order_of_the_rows(tmp_path, target):
    rows = json_rows(write_rows(tmp_path / "in.jsonl", mixed(50)))
    run_job(rows, target, ordered=True)
    assert [record["line"] for record in records(target)] == list(range(1, 51))


@pytest.mark.parametrize(
    "kinds", ["b", "bbb", "g", "gb", "bg", "gbbg", "bbgbbgbb"], ids=lambda kinds: kinds
)
def test_records_are_in_order_wherever_invalid_rows_are(tmp_path, target, kinds):
    rows = [{"prompt": "x"} if kind == "g" else "bad" for kind in kinds]
    run_job(json_rows(write_rows(tmp_path / "in.jsonl", rows)), target, ordered=True)
    found = records(target)
    assert [record["line"] for record in found] == list(range(1, len(kinds) + 1))
    assert "".join("b" if "error" in record else "g" for record in found) == kinds


def test_the_input_is_not_read_ahead(tmp_path, target):
    """The job reads a row only when the stream has room for it."""
    rows = json_rows(write_rows(tmp_path / "in.jsonl", mixed(200)))
    read = []

    def watched():
        for row in rows:
            read.append(row.line)
            yield row

    file = RecordFile(str(target), Mode.NEW)
    file.begin(0)
    job = BatchJob(NativeFormat(), file, prepare)
    most_ahead = 0

    def stream(requests):
        nonlocal most_ahead
        for place, output in FakeStream()(requests):
            most_ahead = max(most_ahead, len(read) - job.tally.num_written)
            yield place, output

    job.run(watched(), stream)
    file.close()
    assert len(read) == 200
    assert most_ahead <= IN_FLIGHT + 1


def test_records_of_invalid_rows_are_written_while_valid_rows_run(tmp_path, target):
    rows = json_rows(write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, "bad", "bad"]))
    seen = []

    def stream(requests):
        list(requests)
        seen.append(target.read_bytes().count(b"\n"))
        yield 0, answer("a")

    file = RecordFile(str(target), Mode.NEW)
    file.begin(0)
    BatchJob(NativeFormat(), file, prepare).run(rows, stream)
    file.close()
    assert seen == [2]


def test_a_request_that_the_engine_refuses_gets_a_record(tmp_path, target):
    rows = json_rows(write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "id": 7}]))
    job = run_job(rows, target, FakeStream(errors=["b"]))
    assert {"id": 7, "line": 2, "error": "refused"} in records(target)
    assert job.tally.num_failed == 1


def test_a_request_that_the_engine_aborted_gets_no_record(tmp_path, target):
    rows = json_rows(write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))

    def stream(requests):
        for place, (prompt, _, _) in enumerate(requests):
            yield place, None if prompt == "a" else answer(prompt)

    file = RecordFile(str(target), Mode.NEW)
    file.begin(0)
    job = BatchJob(NativeFormat(), file, prepare)
    job.run(rows, stream)
    file.close()
    assert (job.tally.num_written, job.tally.num_lost) == (1, 1)
    assert [record["line"] for record in records(target)] == [2]


def test_a_row_s_own_parameters_override_the_defaults():
    params = make_params({"max_tokens": 8, "temperature": 0.0}, {"temperature": 0.5, "seed": 3})
    assert (params.max_tokens, params.temperature, params.seed) == (8, 0.5, 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("num_examples", [80, slow(1000)])
def test_any_parameters_are_accepted_or_refused_with_request_error(num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(st.dictionaries(st.sampled_from(sorted(SamplingParams().__struct_fields__)), JSON))
    def check(given):
        with suppress(RequestError):
            make_params({}, given)

    check()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "unknown option 'temprature'; the nearest option is 'temperature'"),
        ({"temperature": 9}, "temperature must be .*got 9"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"stop": ""}, "stop must be"),
        ({"output_kind": "DELTA"}, "output_kind is not for batch files"),
        ({"": 1}, "unknown option ''"),
    ],
)
def test_invalid_parameters_become_the_row_s_error(tmp_path, target, given, words):
    with pytest.raises(RequestError, match=words):
        make_params({}, given)
    rows = [{"prompt": "a"}, {"prompt": "b", "sampling_params": given}, {"prompt": "c"}]
    job = run_job(json_rows(write_rows(tmp_path / "in.jsonl", rows)), target)
    assert (job.tally.num_written, job.tally.num_failed) == (3, 1)
