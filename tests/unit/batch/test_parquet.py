"""Parquet input and output, compared with pyarrow's own reading and writing."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest
from support.batch_helpers import json_rows, records, run_job, write_rows

from shmllm.batch import journal as journals
from shmllm.batch import parquet
from shmllm.batch.native import NativeFormat
from shmllm.batch.vectors import encoded
from shmllm.errors import RequestError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = pq = None

needs_pyarrow = pytest.mark.skipif(pa is None, reason="pyarrow, of the extra parquet, is missing")


def table(path, columns, schema=None):
    pq.write_table(pa.table(columns, schema=schema), path, row_group_size=2)
    return str(path)


def rows_of(path):
    return parquet.ParquetRows(path, NativeFormat(texts_are_json=True))


@needs_pyarrow
def test_columns_are_fields_and_nulls_are_missing(tmp_path):
    messages = [{"role": "user", "content": "hi", "name": None}]
    path = table(
        tmp_path / "in.parquet",
        {
            "id": [1, None, 3],
            "prompt": ["a", None, None],
            "messages": [None, messages, None],
            "sampling_params": [{"seed": 1, "top_k": None}, None, None],
            "k": [0.5, None, float("nan")],
        },
    )
    first, second, third = rows_of(path)
    assert (first.line, first.prompt, first.sampling) == (1, "a", {"seed": 1})
    assert (first.identity, first.carried) == ({"id": 1}, {"k": 0.5})
    assert second.prompt == [{"role": "user", "content": "hi"}]
    assert (second.identity, second.carried) == ({}, {"k": None})
    assert "none of 'prompt'" in (third.error or "")
    assert rows_of(path).count() == (3, 3)


@needs_pyarrow
def test_messages_and_parameters_may_be_text(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    columns = {"messages": [json.dumps(messages)], "sampling_params": ['{"seed": 1}']}
    (row,) = rows_of(table(tmp_path / "in.parquet", columns))
    assert (row.prompt, row.sampling) == (messages, {"seed": 1})


@needs_pyarrow
def test_a_job_from_parquet_copies_values_that_json_cannot_hold_as_text(tmp_path):
    day = datetime.date(2024, 2, 29)
    path = table(tmp_path / "in.parquet", {"prompt": ["a"], "day": [day], "raw": [b"\xff"]})
    run_job(rows_of(path), tmp_path / "out.jsonl")
    (record,) = records(tmp_path / "out.jsonl")
    assert (record["day"], record["raw"]) == ("2024-02-29", "/w==")


@needs_pyarrow
def test_records_become_a_table(tmp_path):
    source = write_rows(
        tmp_path / "in.jsonl",
        [{"id": i, "prompt": f"p{i}", "k": {"x": [i]}} for i in range(3000)] + ["bad"],
    )
    run_job(json_rows(source), tmp_path / "journal")
    parquet.write_parquet(str(tmp_path / "journal"), str(tmp_path / "out.parquet"))
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    names = {name for record in found for name in record}
    expected = [dict.fromkeys(names) | record for record in records(tmp_path / "journal")]
    assert found == expected
    assert pq.ParquetFile(tmp_path / "out.parquet").metadata.num_row_groups > 1


@needs_pyarrow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([1, None], [1, None]),
        ([None, None], [None, None]),
        ([1, "a"], ["1", "a"]),
        ([True, "a", {"b": 1}], ["true", "a", '{"b": 1}']),
        ([[1], []], [[1], []]),
        ([[], []], [[], []]),
        ([[1], ["a"]], ["[1]", '["a"]']),
        ([{"a": 1}, {"b": "x"}], [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
        ([2**70, 1], [str(2**70), "1"]),
        ([{}, {}], ["{}", "{}"]),
        ([{"a": {}}], ['{"a": {}}']),
        ([{"a": None}], ['{"a": null}']),
        (["\ud800x", "\U0001f600"], ["?x", "\U0001f600"]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rows_at_once", [1, 1024])
def test_a_column_has_one_type(tmp_path, monkeypatch, values, expected, rows_at_once):
    monkeypatch.setattr(journals, "RECORDS_AT_ONCE", rows_at_once)
    journal = write_rows(tmp_path / "journal", [{"line": 1, "x": value} for value in values])
    parquet.write_parquet(str(journal), str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet")["x"].to_pylist() == expected


@needs_pyarrow
def test_vectors_become_lists_of_a_fixed_size(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    rows = [{"line": i, "v": encoded(vector)} for i, vector in enumerate(vectors, 1)]
    journal = write_rows(tmp_path / "journal", [rows[0], {"line": 9, "error": "x"}, *rows[1:]])
    parquet.write_parquet(str(journal), str(tmp_path / "out.parquet"), "v")
    column = pq.read_table(tmp_path / "out.parquet")["v"]
    assert column.type == pa.list_(pa.float32(), 4)
    first, failed, *others = column.to_pylist()
    assert failed is None
    assert np.array_equal(np.array([first, *others], np.float32), vectors)


@needs_pyarrow
def test_without_a_vector_there_is_no_column(tmp_path):
    journal = write_rows(tmp_path / "journal", [{"line": 1, "error": "x"}])
    parquet.write_parquet(str(journal), str(tmp_path / "out.parquet"), "v")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [{"line": 1, "error": "x"}]


@needs_pyarrow
def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"nonsense")
    with pytest.raises(RequestError, match=r"cannot read .*in\.parquet"):
        rows_of(str(tmp_path / "in.parquet"))


@needs_pyarrow
def test_a_failure_leaves_no_incomplete_file(tmp_path):
    journal = write_rows(tmp_path / "journal", [{"line": 1}, "torn"])
    with pytest.raises(ValueError, match="Expecting"):
        parquet.write_parquet(str(journal), str(tmp_path / "out.parquet"))
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_the_error_without_pyarrow_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(parquet, "import_module", missing)
    with pytest.raises(RequestError, match="need pyarrow: pip install 'pyarrow>="):
        parquet.require_pyarrow()
