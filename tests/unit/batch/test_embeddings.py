"""Rows of texts, and records of embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from support.batch_helpers import write_rows

from shmllm.batch.embeddings import EmbeddingFormat, parse_text
from shmllm.batch.resume import DoneLines
from shmllm.batch.rows import encode
from shmllm.errors import RequestError
from shmllm.outputs.pooling import EmbeddingOutput, EmbeddingRequestOutput

VECTOR = np.array([0.5, -1.25], np.float32)


def output(vector=VECTOR):
    return EmbeddingRequestOutput("0", EmbeddingOutput(vector), [5, 6, 7])


def test_a_line_is_a_text_or_an_object():
    assert parse_text(b'"a b"') == {"text": "a b"}
    assert parse_text(b'{"x": 1}') == {"x": 1}
    for line in (b"5", b"[1]", b"null"):
        with pytest.raises(RequestError, match=r"^not a JSON string or object$"):
            parse_text(line)
    with pytest.raises(RequestError, match=r"^not JSON"):
        parse_text(b"plain")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "^none of 'text', 'prompt' is given$"),
        ({"messages": []}, "^none of 'text', 'prompt' is given$"),
        ({"text": "a", "prompt": "b"}, "^'text' and 'prompt' are both given; give one$"),
        ({"text": 5}, "^'text' must be a string, got 5$"),
        ({"prompt": None}, "^'prompt' must be a string, got null$"),
    ],
    ids=str,
)
def test_a_row_without_a_text_is_an_error(fields, words):
    row = EmbeddingFormat().row(1, fields)
    with pytest.raises(RequestError, match=words):
        raise RequestError(row.error)


@pytest.mark.parametrize("images", [False, 0, "", {}, "a.png", [""]])
def test_images_of_a_row_are_a_list(images):
    row = EmbeddingFormat().row(1, {"text": "a", "images": images})
    assert row.error is not None
    assert row.error.startswith("'images' must be a list of paths and data URLs, got ")


@pytest.mark.parametrize("images", [None, []])
def test_a_row_without_images_is_a_text(images):
    row = EmbeddingFormat().row(1, {"text": "a", "images": images})
    assert (row.error, row.prompt, row.items) == (None, "a", {})


@pytest.mark.parametrize("is_journal", [False, True])
def test_a_record_has_the_row_s_fields(is_journal):
    form = EmbeddingFormat(is_journal=is_journal)
    row = form.row(4, {"id": "a", "text": "x", "embedding": "old", "k": [1]})
    record = form.record(row, output())
    vector = record.pop("embedding")
    assert record == {
        "id": "a",
        "line": 4,
        "num_prompt_tokens": 3,
        "input_embedding": "old",
        "k": [1],
    }
    assert vector == ("AAAAPwAAoL8=" if is_journal else [0.5, -1.25])
    line = form.record(form.text_row(5, 2, "plain"), output())
    assert (line["index"], line["text"]) == (2, "plain")


def test_records_of_sparse_vectors(tmp_path):
    form = EmbeddingFormat()
    form.is_sparse = True
    record = form.record(form.row(1, {"text": "x"}), output(np.array([0, 0.5, 0, 2], np.float32)))
    assert record["embedding"] == {"indices": [1, 3], "values": [0.5, 2.0]}
    target = tmp_path / "records"
    target.write_bytes(encode(record))
    done = DoneLines(2)
    done.read(str(target), EmbeddingFormat())
    assert (done.num_done, 1 in done) == (1, True)
    target.write_bytes(encode(record | {"embedding": {"indices": [1]}}))
    with pytest.raises(RequestError, match="is not a record of a batch job"):
        DoneLines(2).read(str(target), EmbeddingFormat())


@pytest.mark.parametrize("is_journal", [False, True])
def test_records_are_found_again(tmp_path, is_journal):
    form = EmbeddingFormat(is_journal=is_journal)
    rows = [form.row(line, {"text": "x", "k": line}) for line in (1, 3)]
    target = tmp_path / "records"
    failure = form.failure(rows[1], "too long")
    target.write_bytes(encode(form.record(rows[0], output())) + encode(failure))
    done = DoneLines(3)
    done.read(str(target), EmbeddingFormat(is_journal=is_journal))
    assert (done.num_done, done.num_failed, 2 in done) == (2, 1, False)
    with pytest.raises(RequestError, match="is not a record of a batch job"):
        DoneLines(3).read(str(target), EmbeddingFormat(is_journal=not is_journal))


@pytest.mark.parametrize("is_journal", [False, True])
def test_a_resumed_job_keeps_the_width(tmp_path, is_journal):
    form = EmbeddingFormat(is_journal=is_journal)
    row = form.row(1, {"text": "x"})
    target = tmp_path / "records"
    target.write_bytes(encode(form.record(row, output())))
    again = EmbeddingFormat(is_journal=is_journal)
    DoneLines(1).read(str(target), again)
    with pytest.raises(RequestError, match=r"have 2 numbers, those .* 3; --overwrite begins anew"):
        again.record(row, output(np.zeros(3, np.float32)))


def test_other_records_are_refused(tmp_path):
    target = write_rows(tmp_path / "records", [{"line": 1, "text": "of generate"}])
    with pytest.raises(RequestError, match=r"line 1 of .* is not a record of a batch job"):
        DoneLines(1).read(str(target), EmbeddingFormat())
